// Cluster view: charts, nodes, KV transfer by pair, events, lists of requests, and the timeline of one request.

import {
  RouterError, ask, askForKeys, byId, bytes, clock, count, counted, el, followFeed, milliseconds, onKeys, setText,
  shortUrl,
} from "./app.js";
import { showHistory } from "./charts.js";
import { rateOf, showNodes, sumOf } from "./nodes.js";
import { timelineView } from "./timeline.js";

const EVENTS_SHOWN = 64;
const RUNNING_POLL_MS = 1000;

// ---- summary ----

function fact(name, value, isBad = false) {
  return el("div", { class: isBad ? "bad" : null }, el("dt", {}, name), el("dd", {}, value));
}

let summaryShown = "";

function showSummary(fleet) {
  const roles = fleet.is_disaggregated ? ["prefill", "decode"] : ["regular"];
  const facts = roles.map((role) => {
    const known = fleet.nodes.filter((node) => node.role === role);
    const ready = known.filter((node) => node.state === "ready").length;
    const name = role === "regular" ? "Ready workers" : `Ready ${role}`;
    return fact(name, `${ready} of ${known.length}`, ready === 0);
  });
  // Each request has a leg at one answering worker.
  const answering = fleet.nodes.filter((node) => node.role !== "prefill");
  facts.push(
    fact("Running requests", count(sumOf(answering, (node) => node.load))),
    fact("Router queue", count(fleet.queued_requests)),
    fact("Prefill tokens/s", count(sumOf(fleet.nodes, (node) => rateOf(node, "prefill_tokens_per_s")))),
    // The first tokens that prefill nodes compute are not added: the sum is that of the nodes below.
    fact("Decode tokens/s", count(sumOf(answering, (node) => rateOf(node, "decode_tokens_per_s")))),
  );
  if (fleet.is_draining) facts.push(fact("Router", "draining", true));
  setText(byId("version"), `Baton router ${fleet.version}`);
  const text = facts.map((one) => one.textContent).join();
  if (text === summaryShown) return;
  summaryShown = text;
  byId("summary").replaceChildren(...facts);
}

// ---- pairs ----

function pairCell(record) {
  if (!record) return el("td", { class: "none" }, el("span", { class: "hidden" }, "no traffic"), "–");
  const speed = record.bytes_per_s ? `${bytes(record.bytes_per_s)}/s` : "–";
  const failures = record.failures
    ? el("span", { class: "failures", title: `last: ${record.last_failure}` }, `${count(record.failures)} failed (${record.last_failure})`)
    : null;
  return el(
    "td", {},
    el("b", {}, record.transport ?? "no pull yet"), " ", speed,
    el("span", { class: "help" }, `${counted(record.requests, "request")}, ${bytes(record.bytes)}`), failures,
  );
}

let pairsShown = "";

function showPairs(fleet) {
  byId("pairs-section").hidden = !fleet.is_disaggregated;
  const known = JSON.stringify([fleet.pairs, fleet.nodes.map((node) => [node.id, node.role])]);
  if (!fleet.is_disaggregated || known === pairsShown) return;
  pairsShown = known;
  const of = (role) => fleet.nodes.filter((node) => node.role === role);
  const decode = of("decode");
  const heads = decode.map((node) => el("th", { scope: "col", class: "name" }, shortUrl(node.url)));
  const rows = of("prefill").map((node) => {
    const cells = decode.map((other) =>
      pairCell(fleet.pairs.find((pair) => pair.prefill === node.id && pair.decode === other.id)));
    return el("tr", {}, el("th", { scope: "row", class: "name" }, shortUrl(node.url)), cells);
  });
  byId("pairs").replaceChildren(
    el(
      "table", { class: "matrix" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "P → D"), heads)), el("tbody", {}, rows),
    ),
  );
}

// ---- events ----

let lastEvent = 0;

function requestLink(id) {
  return el("a", { href: `#request=${encodeURIComponent(id)}` }, id);
}

function eventRow(event) {
  const about = [event.detail, event.request ? " of request " : null, event.request ? requestLink(event.request) : null];
  return el(
    "li", {},
    el("time", { datetime: new Date(event.at_unix_ms).toISOString() }, clock(event.at_unix_ms)),
    el("span", { class: `badge ${event.kind}` }, event.kind),
    el("span", { class: "what" }, `${event.role} ${shortUrl(event.worker)}`, event.detail ? el("small", {}, about) : null),
  );
}

function showEvents(fleet) {
  const list = byId("events");
  // A restarted router counts from 1 again.
  if ((fleet.events.at(-1)?.number ?? 0) < lastEvent) {
    list.replaceChildren();
    lastEvent = 0;
  }
  for (const event of fleet.events) {
    if (event.number <= lastEvent) continue;
    lastEvent = event.number;
    list.prepend(eventRow(event));
  }
  while (list.children.length > EVENTS_SHOWN) list.lastChild.remove();
  // Screen readers speak new events, not the list that was there when the page opened.
  byId("events-log").setAttribute("aria-busy", "false");
}

// ---- requests ----

/** Lists of the snapshot: what they hold, and what an empty one means. */
const FILTERS = {
  requests: ["", "No request yet."],
  slow_requests: ["Longest waits for the first token in the last 10 minutes.", "No request in the last 10 minutes."],
  failed_requests: ["Last requests that ended with an error.", "No request ended with an error."],
};
let fleetShown = null;

/** Style of an outcome: neither a dry run nor a client that left is a failure. */
function outcomeStyle(outcome) {
  if (!outcome) return "running";
  if (outcome === "ok") return "ready";
  return ["dry_run", "client_gone"].includes(outcome) ? "" : "unhealthy";
}

function requestRow(request) {
  const about = [
    request.worker && shortUrl(request.worker),
    request.ttft_ms === null ? null : `TTFT ${milliseconds(request.ttft_ms)}`,
    `${request.outcome ? "total" : "so far"} ${milliseconds(request.ms)}`,
    request.attempts > 1 ? `${request.attempts} attempts` : null,
  ];
  return el(
    "li", {},
    el("time", { datetime: new Date(request.received_unix_ms).toISOString() }, clock(request.received_unix_ms)),
    el("span", { class: `badge ${outcomeStyle(request.outcome)}` }, request.outcome ?? "running"),
    el("span", { class: "what" }, requestLink(request.id), el("small", {}, about.filter(Boolean).join(" · "))),
  );
}

function showRequests(fleet) {
  fleetShown = fleet;
  const list = byId("requests");
  // A list that moves under the keyboard's focus cannot be used.
  if (list.contains(document.activeElement)) return;
  const filter = document.querySelector("input[name=filter]:checked").value;
  const [note, empty] = FILTERS[filter];
  setText(byId("filter-note"), note);
  byId("filter-note").hidden = !note;
  const rows = fleet[filter].map(requestRow);
  list.replaceChildren(...(rows.length ? rows : [el("li", { class: "help" }, empty)]));
}

for (const radio of document.querySelectorAll("input[name=filter]")) {
  radio.addEventListener("change", () => {
    if (fleetShown) showRequests(fleetShown);
  });
}

// ---- one request ----

let requestTimer = 0;

function requestId() {
  const found = /^#request=(.+)$/.exec(location.hash);
  if (!found) return "";
  try {
    return decodeURIComponent(found[1]);
  } catch {
    return found[1]; // not encoded as this page does it
  }
}

async function showRequest() {
  clearTimeout(requestTimer);
  const id = requestId();
  byId("request").hidden = !id;
  document.title = id ? "Request · Baton" : "Cluster · Baton";
  if (!id) return;
  setText(byId("request-title"), `Request ${id}`);
  const body = byId("request-body");
  try {
    const answer = await ask(`../v1/requests/${encodeURIComponent(id)}`, { isControl: true });
    const request = await answer.json();
    if (requestId() !== id) return;
    const opened = body.querySelector("details")?.open ?? false;
    body.replaceChildren(timelineView(request, Date.now() - request.received_unix_ms));
    const details = body.querySelector("details");
    if (details) details.open = opened;
    if (request.state === "running" && !document.hidden) requestTimer = setTimeout(showRequest, RUNNING_POLL_MS);
  } catch (error) {
    if (requestId() !== id) return;
    body.replaceChildren(el("p", { class: "notice" }, error instanceof RouterError ? error.message : "The router cannot be reached."));
    if (error instanceof RouterError && error.isAboutKeys) askForKeys(error.message);
  }
}

window.addEventListener("hashchange", () => {
  showRequest();
  if (requestId()) {
    byId("request").scrollIntoView({ block: "start" });
    byId("request-close").focus({ preventScroll: true });
  }
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) showRequest();
});
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = `request=${encodeURIComponent(byId("find-id").value.trim())}`;
});
onKeys(showRequest);
showRequest();

followFeed(
  (fleet) => {
    showSummary(fleet);
    showHistory(fleet);
    showNodes(fleet);
    showPairs(fleet);
    showEvents(fleet);
    showRequests(fleet);
  },
  (text, isLive) => {
    setText(byId("live"), text);
    byId("live").classList.toggle("on", isLive);
    // Numbers of a moment that is over are shown gray.
    document.body.classList.toggle("stale", !isLive);
  },
);
