// Why a worker was chosen: a sentence, a table of what the policy weighed, and the values behind it.

import { count, counted, el, milliseconds, shortUrl } from "./app.js";

/** Candidates in a table: more columns cannot be read. */
const MAX_COLUMNS = 6;

const REASONS = {
  random: "drawn at random", round_robin: "next in turn", lower_of_two: "less loaded of two",
  prefix_hit: "longest cached prefix", smallest_tree: "no prefix, smallest tree", least_loaded: "least loaded",
  best_holder: "lowest cost, longest prefix", cheaper: "lowest cost, shorter prefix", no_prefix: "lowest cost",
  session: "same session",
  sampled: "cheaper of two drawn", sticky: "same routing key", new_key: "new routing key", no_key: "no routing key",
  only: "only candidate",
};

/** Terms of a candidate, in the order of the table, with the unit they are shown in. */
const TERMS = {
  cost_ms: ["Predicted cost", milliseconds], backlog_ms: ["Backlog", milliseconds], prefill_ms: ["Prefill", milliseconds],
  decode_ms: ["Decode", milliseconds], partner_ms: ["Partner's share", milliseconds],
  crossing_ms: ["Crossing domains", milliseconds], cached_tokens: ["Cached tokens", count],
  session_tokens: ["Expected of the session", count], session_ms: ["Saved by the session", milliseconds],
  uncached_tokens: ["Uncached tokens", count], matched_chars: ["Matched characters", count],
  tree_chars: ["Tree characters", count], keys: ["Routing keys", count], held_blocks: ["Cached blocks", count],
  index_blocks: ["Indexed blocks", count], recent_ms: ["Recent work", milliseconds], load: ["Running requests", count],
};
const HIDDEN = new Set(["worker", "id"]);

const isPlain = (value) => ["number", "string", "boolean"].includes(typeof value);

function plainText(value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number" && !Number.isInteger(value)) return value.toPrecision(3);
  return value === undefined || value === null ? "–" : String(value);
}

const words = (name) => name.replaceAll("_", " ").replace(/^\w/, (letter) => letter.toUpperCase());

/** Reason of a leg in words; one that this page does not know as it is. */
export function reasonText(why) {
  return why ? REASONS[why] ?? why.replaceAll("_", " ") : "–";
}

function costSentence(basis, best, others) {
  const nextMs = Math.min(...others.map((one) => one.cost_ms));
  const cost = `predicted cost ${milliseconds(best.cost_ms)}`;
  if (basis.rule === "hysteresis") {
    return `holds the longest cached prefix, and no other is cheaper by more than ${milliseconds(basis.hysteresis_ms)} (${cost}).`;
  }
  if (basis.rule === "sampled") return `is the cheaper of two drawn candidates, because load reports are stale (${cost}).`;
  if (basis.equals > 1) return `was drawn from ${basis.equals} candidates of equal cost (${cost}).`;
  return `has the lowest ${cost}; the next one's is ${milliseconds(nextMs)}.`;
}

function cachedSentence(basis, best) {
  if (!basis.prompt_tokens || best.cached_tokens === undefined) return "";
  return ` It is expected to have ${count(best.cached_tokens)} of ${counted(Math.round(basis.prompt_tokens), "prompt token")} cached.`;
}

/** The rest of the sentence that begins with the chosen worker. */
function sentenceOf({ policy, candidates, ...basis }, best) {
  const others = candidates.filter((one) => one !== best);
  if (!others.length) return `is the only candidate.${cachedSentence(basis, best)}`;
  if (policy === "cost") return `${costSentence(basis, best, others)}${cachedSentence(basis, best)}`;
  if (policy === "cache_aware" && basis.is_unbalanced) return "is the least loaded: loads differ too much to follow the cache.";
  if (policy === "cache_aware") return `matches ${count(best.matched_chars)} of ${count(basis.total_chars)} characters of the prompt.`;
  if (policy === "power_of_two") return "is the less loaded of two drawn candidates.";
  if (policy === "manual") return best.holds_key ? "was given this routing key before." : "was chosen by load: the routing key is new or missing.";
  if (policy === "random") return "was drawn at random.";
  if (policy === "round_robin") return "is next in turn.";
  return `was chosen by ${policy}.`;
}

/** The chosen worker first, then the cheapest, at most MAX_COLUMNS. */
function shownCandidates(candidates, chosen) {
  const sorted = candidates.toSorted((one, other) =>
    (other.worker === chosen) - (one.worker === chosen) || (one.cost_ms ?? one.load) - (other.cost_ms ?? other.load));
  return sorted.slice(0, MAX_COLUMNS);
}

function candidateTable(candidates, chosen, title) {
  const shown = shownCandidates(candidates, chosen);
  const names = new Set(shown.flatMap((one) => Object.keys(one).filter((name) => isPlain(one[name]) && !HIDDEN.has(name))));
  const isNothing = (name) => name !== "cost_ms" && name.endsWith("_ms") && shown.every((one) => one[name] === 0);
  const known = Object.keys(TERMS).filter((name) => names.has(name) && !isNothing(name));
  const other = [...names].filter((name) => !(name in TERMS));
  const rows = [...known, ...other].map((name) => {
    const [label, format] = TERMS[name] ?? [words(name), plainText];
    return el(
      "tr", {}, el("th", { scope: "row", class: "name" }, label),
      shown.map((one) => el("td", { class: one.worker === chosen ? "chosen" : null }, isPlain(one[name]) ? format(one[name]) : "–")),
    );
  });
  const heads = shown.map((one) => {
    const isChosen = one.worker === chosen;
    return el("th", { scope: "col", class: isChosen ? "chosen" : null }, shortUrl(one.worker), isChosen ? el("b", {}, "chosen") : null);
  });
  const left = candidates.length - shown.length;
  return [
    el(
      "div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Candidates, ${title}` },
      el("table", { class: "terms" }, el("thead", {}, el("tr", {}, el("td", {}), heads)), el("tbody", {}, rows)),
    ),
    left ? el("p", { class: "help" }, `${counted(left, "more candidate")} not shown; the request's record has all.`) : null,
  ];
}

/** What a policy weighed. `chosen`: URL of the worker it took; `title` says for what, as "prefill". */
export function explanationView(explanation, chosen, title) {
  const { policy, candidates, ...basis } = explanation;
  const best = candidates.find((one) => one.worker === chosen) ?? { worker: chosen };
  const values = Object.entries(basis).filter(([, value]) => isPlain(value));
  const about = values.map(([name, value]) => `${name.replaceAll("_", " ")} ${plainText(value)}`).join(", ");
  return el(
    "div", { class: "explanation" },
    el("p", {}, el("b", {}, `${words(title)}: `), el("b", { class: "address" }, shortUrl(chosen)), ` ${sentenceOf(explanation, best)}`),
    candidateTable(candidates, chosen, title),
    el("p", { class: "help" }, `Policy ${policy}${about ? `: ${about}.` : "."}`),
  );
}
