// Cluster view: nodes by role, KV transfer by pair, events, recent requests, and the timeline of one request.

import {
  RouterError, ask, askForKeys, byId, bytes, clock, count, el, followFeed, milliseconds, notice, onKeys, setText,
  shortUrl,
} from "./app.js";
import { timelineView } from "./timeline.js";

const ROLE_NAMES = { prefill: "Prefill", decode: "Decode", regular: "Workers" };
const EVENTS_SHOWN = 64;
const RUNNING_POLL_MS = 1000;

// ---- summary ----

const sumOf = (nodes, read) => nodes.reduce((sum, node) => sum + (read(node) ?? 0), 0);
const rateOf = (node, name) => {
  const measured = node.ranks.filter((rank) => rank[name] !== undefined);
  return measured.length ? sumOf(measured, (rank) => rank[name]) : null;
};

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
    fact("In flight", count(sumOf(answering, (node) => node.load))),
    fact("Queued here", count(fleet.queued_requests)),
    fact("Prefill", `${count(sumOf(fleet.nodes, (node) => rateOf(node, "prefill_tokens_per_s")))} tok/s`),
    fact("Decode", `${count(sumOf(fleet.nodes, (node) => rateOf(node, "decode_tokens_per_s")))} tok/s`),
    fact("Router", fleet.is_draining ? `${fleet.version}, draining` : fleet.version, fleet.is_draining),
  );
  const text = facts.map((one) => one.textContent).join();
  if (text === summaryShown) return;
  summaryShown = text;
  byId("summary").replaceChildren(...facts);
}

// ---- nodes ----

const cards = new Map();

function reportsOf(node) {
  return node.ranks.map((rank) => rank.report).filter((report) => report !== undefined);
}

function kvOf(node) {
  const reports = reportsOf(node).filter((report) => report.kv_pages);
  return { used: sumOf(reports, (report) => report.kv_pages_used), pages: sumOf(reports, (report) => report.kv_pages) };
}

function queueText(node) {
  const reports = reportsOf(node);
  if (!reports.length) return "–";
  const tokens = count(sumOf(reports, (report) => report.queued_tokens));
  if (reports.every((report) => report.queued_requests === null)) return `${tokens} tok`;
  return `${count(sumOf(reports, (report) => report.queued_requests))} (${tokens} tok)`;
}

function rateText(node) {
  const name = node.role === "prefill" ? "prefill_tokens_per_s" : "decode_tokens_per_s";
  const rate = rateOf(node, name);
  return rate === null ? "–" : count(rate);
}

function makeCard(node) {
  const parts = {
    state: el("span", { class: "badge" }),
    reason: el("p", { class: "reason" }),
    kvText: el("span"),
    kv: el("meter", { min: "0", max: "1", high: "0.85", optimum: "0", "aria-label": `KV pages of ${shortUrl(node.url)}` }),
    load: el("dd"), queue: el("dd"), rate: el("dd"),
    about: el("p", { class: "help" }),
    drain: el("button", { type: "button", class: "quiet", onclick: () => drainOrUndrain(node.id) }),
  };
  const pair = (name, value) => el("div", {}, el("dt", {}, name), value);
  const title = el("h4", { id: `node-${node.id}` }, shortUrl(node.url));
  const card = el(
    "article", { class: "node panel", "aria-labelledby": `node-${node.id}` },
    el("div", { class: "panel-head" }, title, parts.state),
    parts.reason,
    el("p", { class: "kv" }, el("span", {}, "KV"), parts.kvText),
    parts.kv,
    el("dl", { class: "numbers" }, pair("In flight", parts.load), pair("Queue", parts.queue), pair("Tokens/s", parts.rate)),
    el("div", { class: "panel-foot" }, parts.about, parts.drain),
  );
  return { card, parts, node };
}

function updateCard({ card, parts }, node) {
  card.dataset.state = node.state;
  card.dataset.role = node.role;
  const isOpen = node.circuit !== "closed" && node.state === "ready";
  const state = isOpen ? `circuit ${node.circuit.replace("_", " ")}` : node.state;
  setText(parts.state, state);
  parts.state.className = `badge ${isOpen ? "warn" : node.state}`;
  setText(parts.reason, node.reason ?? "");
  parts.reason.hidden = !node.reason;
  const { used, pages } = kvOf(node);
  parts.kv.value = pages ? used / pages : 0;
  setText(parts.kvText, pages ? `${Math.round((100 * used) / pages)} % of ${count(pages)} pages` : "not reported");
  setText(parts.load, count(node.load));
  setText(parts.queue, queueText(node));
  setText(parts.rate, rateText(node));
  const ranks = node.ranks.length > 1 ? `${node.ranks.length} ranks` : null;
  const age = reportsOf(node).map((report) => report.age_ms);
  const reported = age.length ? `reported ${milliseconds(Math.max(...age))} ago` : null;
  setText(parts.about, [node.model, node.version, ranks, reported].filter(Boolean).join(" · "));
  const verb = node.state === "draining" ? "Undrain" : "Drain";
  setText(parts.drain, verb);
  parts.drain.setAttribute("aria-label", `${verb} ${shortUrl(node.url)}`);
}

function showNodes(fleet) {
  const box = byId("nodes");
  for (const [id, known] of cards) {
    if (fleet.nodes.some((node) => node.id === id)) continue;
    known.card.remove();
    cards.delete(id);
  }
  for (const role of ["prefill", "decode", "regular"]) {
    const nodes = fleet.nodes.filter((node) => node.role === role);
    let group = byId(`role-${role}`);
    if (!nodes.length) {
      group?.remove();
      continue;
    }
    if (!group) {
      const title = el("h3", { id: `role-${role}-title` }, ROLE_NAMES[role]);
      group = el(
        "section", { id: `role-${role}`, "aria-labelledby": `role-${role}-title` }, title, el("div", { class: "grid" }),
      );
      box.append(group);
    }
    for (const node of nodes) {
      let known = cards.get(node.id);
      if (!known) {
        known = makeCard(node);
        cards.set(node.id, known);
        group.lastChild.append(known.card);
      }
      known.node = node;
      updateCard(known, node);
    }
  }
  let rest = byId("nodes-rest");
  if (!fleet.nodes.length || fleet.nodes_left_out) {
    rest ??= box.appendChild(el("p", { id: "nodes-rest", class: "help" }));
    setText(rest, fleet.nodes.length ? `${fleet.nodes_left_out} more workers are not shown.` : "No worker is registered.");
  } else rest?.remove();
}

// ---- drain ----

async function drainOrUndrain(id) {
  const { node } = cards.get(id);
  if (node.state === "draining") await order(id, "undrain");
  else if (await isConfirmed(node)) await order(id, "drain");
}

async function isConfirmed(node) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), `Drain ${shortUrl(node.url)}?`);
  const running = node.load === 1 ? "1 request" : `${count(node.load)} requests`;
  setText(
    byId("confirm-text"),
    `It gets no new requests; ${running} in flight will finish. A worker that knows no drain of its own is then removed `
    + "from this router.",
  );
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes";
}

async function order(id, verb) {
  try {
    await ask(`../workers/${encodeURIComponent(id)}/${verb}`, { isControl: true, method: "POST" });
    notice("");
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  if (error instanceof RouterError) {
    notice(error.message);
    if (error.isAboutKeys) askForKeys(error.message);
  } else notice("The router cannot be reached.");
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
    el("span", { class: "help" }, `${count(record.requests)} requests, ${bytes(record.bytes)}`), failures,
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
      el("caption", {}, "Rows: prefill nodes. Columns: decode nodes. Transport and speed of the recent pulls, as decode nodes report them."),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "P → D"), heads)), el("tbody", {}, rows),
    ),
  );
}

// ---- events and recent requests ----

let lastEvent = 0;

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
    list.prepend(
      el(
        "li", {},
        el("time", { datetime: new Date(event.at_unix_ms).toISOString() }, clock(event.at_unix_ms)),
        el("span", { class: `badge ${event.kind}` }, event.kind),
        el("span", { class: "what" }, `${event.role} ${shortUrl(event.worker)}`, event.detail ? el("small", {}, event.detail) : null),
      ),
    );
  }
  while (list.children.length > EVENTS_SHOWN) list.lastChild.remove();
}

/** Style of an outcome: neither a dry run nor a client that left is a failure. */
function outcomeStyle(outcome) {
  if (!outcome) return "running";
  if (outcome === "ok") return "ready";
  return ["dry_run", "client_gone"].includes(outcome) ? "" : "unhealthy";
}

function showRequests(fleet) {
  const list = byId("requests");
  // A list that moves under the keyboard's focus cannot be used.
  if (list.contains(document.activeElement)) return;
  const rows = fleet.requests.map((request) =>
    el(
      "li", {},
      el("time", { datetime: new Date(request.received_unix_ms).toISOString() }, clock(request.received_unix_ms)),
      el("span", { class: `badge ${outcomeStyle(request.outcome)}` }, request.outcome ?? "running"),
      el(
        "span", { class: "what" },
        el("a", { href: `#request=${encodeURIComponent(request.id)}` }, request.id),
        el("small", {}, [request.worker && shortUrl(request.worker), milliseconds(request.ms), request.attempts > 1 ? `${request.attempts} attempts` : null].filter(Boolean).join(" · ")),
      ),
    ));
  list.replaceChildren(...(rows.length ? rows : [el("li", { class: "help" }, "None yet.")]));
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
    showNodes(fleet);
    showPairs(fleet);
    showEvents(fleet);
    showRequests(fleet);
  },
  (text, isLive) => {
    setText(byId("live"), text);
    byId("live").classList.toggle("on", isLive);
  },
);
