// Where the time of one request went: a bar of stages, its legend, every leg, and why its workers were chosen.

import { bytes, count, el, milliseconds, shortUrl } from "./app.js";

const STAGE_NAMES = {
  queue: "Queue", prefill: "Prefill", transfer: "KV transfer", decode: "Decode", failed: "Failed attempt",
};

/** Answering leg of an attempt and its prefill leg, if it has one. */
function attemptsOf(request) {
  const attempts = new Map();
  for (const leg of request.legs) {
    const attempt = attempts.get(leg.attempt) ?? {};
    attempt[leg.role === "prefill" ? "prefill" : "answer"] = leg;
    attempts.set(leg.attempt, attempt);
  }
  return [...attempts].sort(([a], [b]) => a - b);
}

/**
 * Stages of a request in order, `{kind, from, to, worker}` in ms since it arrived. What is not known yet ends at
 * `elapsedMs`. The stages of an attempt that failed before its first token are one.
 */
export function stagesOf(request, elapsedMs) {
  const stages = [];
  const ended = request.timeline.ended_ms ?? Math.max(elapsedMs ?? 0, 0);
  const add = (kind, from, to, worker) => {
    if (to > from) stages.push({ kind, from, to, worker });
  };
  let from = 0;
  for (const [number, { prefill, answer }] of attemptsOf(request)) {
    const failure = request.failed_attempts.find((failed) => failed.attempt === number);
    const first = answer?.first_token_ms ?? null;
    const until = failure?.at_ms ?? answer?.ended_ms ?? ended;
    if (failure && first === null) {
      add("failed", from, until, (failure.role === "prefill" ? prefill : answer)?.worker);
      from = until;
      continue;
    }
    const computing = prefill ?? answer;
    const computed = Math.min(computing?.first_token_ms ?? until, first ?? until);
    const sent = computing?.sent_ms ?? until;
    const queued = Math.min(sent + (computing?.stages?.queue_ms ?? 0), computed);
    add("queue", from, queued, computing?.worker);
    add("prefill", queued, computed, computing?.worker);
    if (prefill) add("transfer", computed, first ?? until, answer?.worker);
    if (first !== null) add("decode", first, until, answer?.worker);
    from = until;
  }
  if (!request.legs.length) add("queue", 0, ended);
  return stages;
}

/** Failures after which another worker resumed the answer. */
export function failoversOf(request) {
  return request.failed_attempts.filter((failed) => failed.failover_at_token !== undefined);
}

function transferOf(request) {
  const leg = request.legs.findLast((one) => one.role !== "prefill" && one.stages?.pull);
  return leg?.stages.pull;
}

/** Sums by kind, in the order of the stages, with the workers they happened at. */
function legendOf(stages) {
  const kinds = new Map();
  for (const stage of stages) {
    const sum = kinds.get(stage.kind) ?? { ms: 0, workers: new Set() };
    sum.ms += stage.to - stage.from;
    if (stage.worker) sum.workers.add(shortUrl(stage.worker));
    kinds.set(stage.kind, sum);
  }
  return kinds;
}

function legendText(kind, { ms, workers }, pull) {
  const at = kind === "queue" ? "" : ` on ${[...workers].join(", then ")}`;
  const how = kind === "transfer" && pull && pull.bytes ? ` by ${pull.transport}, ${bytes(pull.bytes)}` : "";
  return `${milliseconds(ms)}${workers.size ? at : ""}${how}`;
}

/** The bar with its legend. `elapsedMs`: how old a request that still runs is. */
export function stageBar(request, elapsedMs) {
  const stages = stagesOf(request, elapsedMs);
  const total = Math.max(stages.at(-1)?.to ?? 0, 1e-3);
  const pull = transferOf(request);
  const legend = legendOf(stages);
  const failovers = failoversOf(request);
  const spoken = [...legend].map(([kind, sum]) => `${STAGE_NAMES[kind]} ${legendText(kind, sum, pull)}`);
  const marks = failovers.map((failed) => `failover after ${failed.failover_at_token} tokens`);
  const bar = el("div", { class: "bar", role: "img", "aria-label": [...spoken, ...marks].join("; ") });
  for (const stage of stages) {
    const title = `${STAGE_NAMES[stage.kind]}: ${milliseconds(stage.to - stage.from)}`;
    const part = el("span", { class: `stage ${stage.kind}`, title });
    part.style.flexGrow = String((stage.to - stage.from) / total);
    bar.append(part);
  }
  for (const failed of failovers) {
    const mark = el("span", { class: "mark", title: `failover after ${failed.failover_at_token} tokens` });
    mark.style.insetInlineStart = `${Math.min((failed.at_ms / total) * 100, 100)}%`;
    bar.append(mark);
  }
  const items = [...legend].map(([kind, sum]) =>
    el(
      "li", { "data-stage": kind },
      el("span", { class: `chip ${kind}`, "aria-hidden": "true" }),
      el("b", {}, STAGE_NAMES[kind]), " ", legendText(kind, sum, pull),
    ));
  const facts = failovers.map((failed) =>
    el(
      "li", { class: "failover", "data-stage": "failover" },
      el("span", { class: "chip failover", "aria-hidden": "true" }),
      el("b", {}, "Failover"), ` after ${failed.failover_at_token} tokens (${failed.reason})`,
    ));
  return el("div", { class: "stages" }, bar, el("ul", { class: "legend", "aria-label": "Stages" }, items, facts));
}

function usageOf(request) {
  return request.legs.findLast((leg) => leg.usage && leg.role !== "prefill")?.usage
    ?? request.legs.findLast((leg) => leg.usage)?.usage;
}

/** Prompt, cached and answer tokens in words; empty if no worker has counted yet. */
export function tokensText(usage) {
  if (!usage) return "";
  const cached = usage.cached_tokens ?? usage.prompt_tokens_details?.cached_tokens;
  const found = cached === null || cached === undefined ? "" : ` (${count(cached)} cached)`;
  const answer = usage.completion_tokens;
  return `${count(usage.prompt_tokens)} prompt tokens${found}`
    + (answer === null || answer === undefined ? "" : `, ${count(answer)} answer tokens`);
}

const cell = (text) => el("td", {}, text);

function legsTable(request) {
  const at = (ms) => cell(milliseconds(ms));
  const rows = request.legs.map((leg) => {
    const pull = leg.stages?.pull;
    const transfer = pull?.bytes ? `${pull.transport}, ${bytes(pull.bytes)} in ${milliseconds(pull.pull_ms)}` : "–";
    return el(
      "tr", {},
      cell(`${leg.attempt}`), cell(leg.role), el("td", { class: "name" }, shortUrl(leg.worker)), cell(leg.why ?? "–"),
      at(leg.chosen_ms), at(leg.sent_ms), at(leg.stages?.queue_ms), at(leg.first_token_ms), at(leg.ended_ms),
      cell(transfer), cell(leg.outcome ?? "running"),
    );
  });
  const heads = ["Attempt", "Role", "Worker", "Reason", "Chosen", "Sent", "Engine queue", "First token", "Ended",
    "KV transfer", "Outcome"];
  return el(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Legs" },
    el(
      "table", {}, el("caption", {}, "Legs: one request to one worker; times since the request arrived"),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows),
    ),
  );
}

const isPlain = (value) => ["number", "string", "boolean"].includes(typeof value);

function plainText(value) {
  if (typeof value === "number" && !Number.isInteger(value)) return value.toPrecision(4);
  return value === undefined || value === null ? "–" : String(value);
}

/** What a policy weighed: one row per candidate, with the terms of its cost. `chosen`: the worker it took. */
export function explanationTable(explanation, chosen, role) {
  const { policy, candidates, ...basis } = explanation;
  const hidden = new Set(["worker", "id"]);
  const names = [...new Set(candidates.flatMap((one) => Object.keys(one).filter((name) => isPlain(one[name]))))];
  const columns = names.filter((name) => !hidden.has(name));
  const rows = candidates.map((one) => {
    const isChosen = one.worker === chosen;
    return el(
      "tr", { class: isChosen ? "chosen" : null },
      el("th", { scope: "row", class: "name" }, shortUrl(one.worker), isChosen ? el("b", {}, " chosen") : null),
      columns.map((name) => cell(plainText(one[name]))),
    );
  });
  const facts = Object.entries(basis).filter(([, value]) => isPlain(value));
  const about = facts.map(([name, value]) => `${name} ${plainText(value)}`).join(", ");
  const title = `${role}: policy ${policy}${about ? ` (${about})` : ""}`;
  return el(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Candidates, ${role}` },
    el(
      "table", {}, el("caption", {}, title),
      el(
        "thead", {},
        el("tr", {}, ["worker", ...columns].map((name) => el("th", { scope: "col" }, name.replaceAll("_", " ")))),
      ),
      el("tbody", {}, rows),
    ),
  );
}

/** Decisions of a timeline with all candidates; null if the request was sent without x-baton-explain. */
export function decisionsOf(request) {
  const explained = request.legs.filter((leg) => leg.explanation);
  if (!explained.length) return null;
  const tables = explained.map((leg) => explanationTable(leg.explanation, leg.worker, `attempt ${leg.attempt}, ${leg.role}`));
  return el("details", { class: "why" }, el("summary", {}, "Why these workers"), tables);
}

/** The whole timeline of a request, for the request view. */
export function timelineView(request, elapsedMs) {
  const outcome = request.state === "running" ? "running" : `${request.status} ${request.outcome}`;
  const facts = [
    ["Id", request.id], ["Route", request.route], ["Arrived", new Date(request.received_unix_ms).toLocaleString()],
    ["Outcome", outcome], ["First byte", milliseconds(request.timeline.first_byte_ms)],
    ["Ended", milliseconds(request.timeline.ended_ms)], ["Tokens", tokensText(usageOf(request)) || "–"],
    ["Trace", request.trace_id ?? "not traced"],
  ];
  const failures = request.failed_attempts.map((failed) =>
    el(
      "li", {}, `Attempt ${failed.attempt}: ${failed.role} failed with ${failed.reason} after ${milliseconds(failed.at_ms)}`,
      failed.failover_at_token === undefined ? null : `; the answer was resumed after ${failed.failover_at_token} tokens`,
    ));
  return el(
    "div", { class: "timeline" },
    stageBar(request, elapsedMs),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    failures.length ? el("ul", { class: "failures" }, failures) : null,
    legsTable(request),
    decisionsOf(request),
  );
}
