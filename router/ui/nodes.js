// Nodes of the fleet: a card for each, by role, with their order and their drain.

import {
  RouterError, ask, askForKeys, byId, count, counted, el, milliseconds, notice, percent, setText, shortUrl,
} from "./app.js";

const ROLE_NAMES = { prefill: "Prefill", decode: "Decode", regular: "Workers" };
const STATES = ["unhealthy", "rejected", "starting", "draining", "ready"];

const cards = new Map();
let fleetShown = null;

export const sumOf = (nodes, read) => nodes.reduce((sum, node) => sum + (read(node) ?? 0), 0);

/** Tokens per second of all ranks that report them; null if none does. */
export function rateOf(node, name) {
  const measured = node.ranks.filter((rank) => rank[name] !== undefined);
  return measured.length ? sumOf(measured, (rank) => rank[name]) : null;
}

function reportsOf(node) {
  return node.ranks.map((rank) => rank.report).filter((report) => report !== undefined);
}

function kvOf(node) {
  const reports = reportsOf(node).filter((report) => report.kv_pages);
  return { used: sumOf(reports, (report) => report.kv_pages_used), pages: sumOf(reports, (report) => report.kv_pages) };
}

const queuedTokensOf = (node) => sumOf(reportsOf(node), (report) => report.queued_tokens);

// ---- order ----

/** Largest first, but for the address. */
const SORT_KEYS = {
  address: () => 0,
  state: (node) => STATES.length - STATES.indexOf(node.state) + (node.circuit === "closed" ? 0 : 1),
  load: (node) => node.load,
  queue: queuedTokensOf,
  kv: (node) => {
    const { used, pages } = kvOf(node);
    return pages ? used / pages : 0;
  },
};

function sorted(nodes) {
  const keyOf = SORT_KEYS[byId("sort").value];
  const byAddress = (one, other) => one.url.localeCompare(other.url, "en", { numeric: true });
  return nodes.toSorted((one, other) => keyOf(other) - keyOf(one) || byAddress(one, other));
}

/** Puts cards in this order, unless the pointer or the focus is on one: it must not move away. */
function arrange(grid, wanted) {
  const isInUse = grid.matches(":hover") || grid.contains(document.activeElement);
  const present = [...grid.children];
  const isSame = wanted.length === present.length && wanted.every((card, index) => card === present[index]);
  if (isSame || (isInUse && wanted.length === present.length)) return;
  grid.append(...wanted);
}

// ---- cards ----

function makeCard(node) {
  const parts = {
    state: el("span", { class: "badge" }),
    reason: el("p", { class: "reason" }),
    kvText: el("span"),
    kv: el("meter", { min: "0", max: "1", high: "0.85", optimum: "0", "aria-label": `KV pages of ${shortUrl(node.url)}` }),
    load: el("dd"), queue: el("span"), queuedTokens: el("small"), rate: el("dd"),
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
    el(
      "dl", { class: "numbers" },
      pair("Running", parts.load), pair("Queue", el("dd", {}, parts.queue, parts.queuedTokens)), pair("Tokens/s", parts.rate),
    ),
    el("div", { class: "panel-foot" }, parts.about, parts.drain),
  );
  return { card, parts, node };
}

function showQueue(parts, node) {
  const reports = reportsOf(node);
  const isCounted = reports.length > 0 && reports.every((report) => report.queued_requests !== null);
  const requests = sumOf(reports, (report) => report.queued_requests);
  const tokens = reports.length ? counted(queuedTokensOf(node), "token") : "";
  setText(parts.queue, isCounted ? counted(requests, "request") : tokens || "–");
  setText(parts.queuedTokens, isCounted ? tokens : "");
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
  setText(parts.kvText, pages ? `${percent(used / pages)} of ${counted(pages, "page")}` : "not reported");
  setText(parts.load, counted(node.load, "request"));
  showQueue(parts, node);
  const rate = rateOf(node, node.role === "prefill" ? "prefill_tokens_per_s" : "decode_tokens_per_s");
  setText(parts.rate, count(rate));
  const ranks = node.ranks.length > 1 ? `${node.ranks.length} ranks` : null;
  const age = reportsOf(node).map((report) => report.age_ms);
  const reported = age.length ? `reported ${milliseconds(Math.max(...age))} ago` : null;
  setText(parts.about, [node.model, node.version, ranks, reported].filter(Boolean).join(" · "));
  const verb = node.state === "draining" ? "Undrain" : "Drain";
  setText(parts.drain, verb);
  parts.drain.setAttribute("aria-label", `${verb} ${shortUrl(node.url)}`);
}

function groupOf(role) {
  const known = byId(`role-${role}`);
  if (known) return known;
  const title = el("h3", { id: `role-${role}-title` }, ROLE_NAMES[role]);
  const group = el(
    "section", { id: `role-${role}`, "aria-labelledby": `role-${role}-title` }, title, el("div", { class: "grid" }),
  );
  byId("nodes").append(group);
  return group;
}

function showRole(role, nodes) {
  if (!nodes.length) {
    byId(`role-${role}`)?.remove();
    return;
  }
  const wanted = sorted(nodes).map((node) => {
    if (!cards.has(node.id)) cards.set(node.id, makeCard(node));
    const known = cards.get(node.id);
    known.node = node;
    updateCard(known, node);
    return known.card;
  });
  arrange(groupOf(role).lastChild, wanted);
}

/** Shows the nodes of a snapshot. */
export function showNodes(fleet) {
  fleetShown = fleet;
  for (const [id, known] of cards) {
    if (fleet.nodes.some((node) => node.id === id)) continue;
    known.card.remove();
    cards.delete(id);
  }
  for (const role of Object.keys(ROLE_NAMES)) showRole(role, fleet.nodes.filter((node) => node.role === role));
  let rest = byId("nodes-rest");
  if (!fleet.nodes.length || fleet.nodes_left_out) {
    rest ??= byId("nodes").appendChild(el("p", { id: "nodes-rest", class: "help" }));
    setText(rest, fleet.nodes.length ? `${counted(fleet.nodes_left_out, "more worker")} not shown.` : "No worker is registered.");
  } else rest?.remove();
}

byId("sort").addEventListener("change", () => {
  if (fleetShown) showNodes(fleetShown);
});

// ---- drain ----

async function drainOrUndrain(id) {
  const { node } = cards.get(id);
  if (node.state === "draining") await order(id, "undrain");
  else if (await isConfirmed(node)) await order(id, "drain");
}

/** Consequence of a drain that leaves no ready node for this one's requests; else empty. */
function lastNodeWarning(node) {
  if (node.state !== "ready" || node.ready_peers > 0) return "";
  if (node.role === "prefill") return "This is the last ready prefill node. Decode nodes will compute prompts themselves, which slows their answers down.";
  const name = node.role === "decode" ? "decode node" : "worker";
  return `This is the last ready ${name}. New requests will wait for another one, and fail if none comes in time.`;
}

async function isConfirmed(node) {
  const dialog = byId("confirm");
  const warning = lastNodeWarning(node);
  setText(byId("confirm-title"), `Drain ${shortUrl(node.url)}?`);
  setText(byId("confirm-warning"), warning);
  byId("confirm-warning").hidden = !warning;
  setText(byId("confirm-yes"), warning ? "Drain the last one" : "Drain");
  setText(
    byId("confirm-text"),
    `It gets no new requests; ${counted(node.load, "request")} in flight will finish. A worker that has no drain of its own `
    + "is then removed from this router.",
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
    if (error instanceof RouterError) {
      notice(error.message);
      if (error.isAboutKeys) askForKeys(error.message);
    } else notice("The router cannot be reached.");
  }
}
