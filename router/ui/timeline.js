// Where the time of one request went: a bar of stages, its legend, every leg, and why its workers were chosen.

import { bytes, count, el, milliseconds, shortUrl } from "./app.js";
import { explanationView, reasonText } from "./explanation.js";

const STAGE_NAMES = {
  queue: "Queue", prefill: "Prefill", handover: "Handover", decode: "Decode", failed: "Failed attempt",
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
    // Shown also when D's first event came before P's: then all of it happened during the prefill.
    const isHandedOver = prefill && first !== null;
    if (isHandedOver && first <= computed) stages.push({ kind: "handover", from: computed, to: computed, worker: answer.worker });
    else if (prefill) add("handover", computed, first ?? until, answer?.worker);
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

/** How D got the KV pages, in words; empty if no page had to move. */
function pullText(pull) {
  return pull.bytes ? `${pull.transport}, ${bytes(pull.bytes)} in ${milliseconds(pull.pull_ms)}` : "";
}

/**
 * Parts of the last handover in words: from P's first token to D's first event. D's queue and pull begin before, so
 * only what is left of them then can be part of it; the pull's whole time is named, with how much of it was hidden.
 */
function handoverText(request) {
  const attempts = attemptsOf(request);
  const last = attempts.findLast(([, legs]) => legs.prefill && legs.answer?.stages);
  if (!last) return "";
  const { prefill, answer } = last[1];
  const first = answer.first_token_ms;
  const begin = Math.min(prefill.first_token_ms ?? first, first);
  const queueEnd = Math.min((answer.sent_ms ?? begin) + (answer.stages.queue_ms ?? 0), first);
  const queueMs = Math.max(queueEnd - begin, 0);
  const leftMs = first - begin - queueMs;
  const { pull } = answer.stages;
  const pulledMs = Math.min(pull?.pull_ms ?? 0, leftMs);
  const parts = [];
  if (queueMs > 0) parts.push(`queue on D ${milliseconds(queueMs)}`);
  if (pull?.bytes) {
    const hiddenMs = pull.pull_ms - pulledMs;
    const hidden = hiddenMs > 0.05 ? `, ${milliseconds(hiddenMs)} of it during the prefill` : "";
    parts.push(`pull ${milliseconds(pull.pull_ms)} (${pull.transport}, ${bytes(pull.bytes)}${hidden})`);
  } else if (pull) parts.push("nothing to pull");
  if (leftMs > pulledMs) parts.push(`then first event ${milliseconds(leftMs - pulledMs)}`);
  const handovers = attempts.filter(([, legs]) => legs.prefill && legs.answer?.first_token_ms);
  return `${handovers.length > 1 ? "the last one " : ""}${parts.join(", ")}`;
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

function legendText(kind, { ms, workers }, handover) {
  const at = kind === "queue" ? "" : ` on ${[...workers].join(", then ")}`;
  const how = kind === "handover" && handover ? `: ${handover}` : "";
  return `${milliseconds(ms)}${workers.size ? at : ""}${how}`;
}

/** The bar with its legend. `elapsedMs`: how old a request that still runs is. */
export function stageBar(request, elapsedMs) {
  const stages = stagesOf(request, elapsedMs);
  const total = Math.max(stages.at(-1)?.to ?? 0, 1e-3);
  const handover = handoverText(request);
  const legend = legendOf(stages);
  const failovers = failoversOf(request);
  const spoken = [...legend].map(([kind, sum]) => `${STAGE_NAMES[kind]} ${legendText(kind, sum, handover)}`);
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
      el("b", {}, STAGE_NAMES[kind]), " ", legendText(kind, sum, handover),
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
    const { pull } = leg.stages ?? {};
    return el(
      "tr", {},
      cell(`${leg.attempt}`), cell(leg.role), el("td", { class: "name" }, shortUrl(leg.worker)), cell(reasonText(leg.why)),
      at(leg.chosen_ms), at(leg.sent_ms), at(leg.stages?.queue_ms), at(leg.first_token_ms), at(leg.ended_ms),
      cell((pull && pullText(pull)) || "–"), cell(leg.outcome ?? "running"),
    );
  });
  const heads = ["Attempt", "Role", "Worker", "Reason", "Chosen", "Sent", "Engine queue", "First token", "Ended",
    "KV pull", "Outcome"];
  return el(
    "div", {},
    el("p", { class: "help table-note" }, "Legs: each sending of the request to a worker. Times count from its arrival at the router."),
    el(
      "div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table of legs" },
      el(
        "table", {},
        el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows),
      ),
    ),
  );
}

/** Decisions of a timeline with all candidates; null if the request was sent without x-baton-explain. */
export function decisionsOf(request) {
  const explained = request.legs.filter((leg) => leg.explanation);
  if (!explained.length) return null;
  const attempts = explained.at(-1).attempt;
  const views = explained.map((leg) => {
    const title = attempts > 1 ? `Attempt ${leg.attempt}, ${leg.role}` : leg.role;
    return explanationView(leg.explanation, leg.worker, title);
  });
  return el("details", { class: "why" }, el("summary", {}, "Why these workers?"), el("div", { class: "explanations" }, views));
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
