// What both pages share: keys, requests to the router, server-sent events, elements from text.
// Data is only ever put into text nodes and attributes, never parsed as HTML.

const API_KEY = "baton.api_key";
const CONTROL_KEY = "baton.control_key";
const LONGEST_RETRY_MS = 10_000;
/** The router sends a snapshot each second: after this long without one the numbers shown are stale. */
const STALE_MS = 3_000;
/** A connection without a snapshot for this long is replaced: its other end may be gone. */
const RECONNECT_MS = 15_000;
const WATCH_MS = 500;

/** An element with attributes, listeners (`onclick`) and children; text children become text nodes. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets text only where it differs, so that selections and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- numbers ----

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms === 0) return "0 ms";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 120_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.round(ms / 60_000)} min`;
}

export function count(number) {
  if (number === null || number === undefined) return "–";
  if (number < 10 && !Number.isInteger(number)) return number.toFixed(1);
  if (number < 1e5) return Math.round(number).toLocaleString("en-US");
  if (number < 1e6) return `${Math.round(number / 1e3)} k`;
  return `${(number / 1e6).toFixed(1)} M`;
}

/** `1 request`, `2 requests`. */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const isSmall = share > 0 && share < 0.1;
  return `${isSmall ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (number >= 1000 && at < units.length - 1) {
    number /= 1000;
    at += 1;
  }
  return `${number < 10 && at > 0 ? number.toFixed(1) : Math.round(number)} ${units[at]}`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString();
}

/** Host and port of a worker's URL: what differs between workers. */
export function shortUrl(url) {
  return url.replace(/^https?:\/\//, "").replace(/\/$/, "");
}

// ---- keys ----

// `baton up` links to the page with its key behind "#", which browsers send to no server. It is taken
// out of the address at once, so that no bookmark holds it.
const givenKey = /^#control-key=([\w-]+)$/.exec(location.hash);
if (givenKey) {
  sessionStorage.setItem(CONTROL_KEY, givenKey[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

function stored(name) {
  return sessionStorage.getItem(name) ?? "";
}

const listeners = [];

/** Calls `listener` whenever the keys were changed. */
export function onKeys(listener) {
  listeners.push(listener);
}

function keyField(id, label, help, name) {
  return [
    el("label", { for: id }, label),
    el("input", {
      id, type: "password", autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-help`,
      value: stored(name),
    }),
    el("p", { id: `${id}-help`, class: "help" }, help),
  ];
}

let keysDialog = null;

/** Opens the form for the keys; `why` says which one is missing. */
export function askForKeys(why = "") {
  if (keysDialog?.open) return;
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", { id: "keys-title" }, "Keys"),
    why ? el("p", { class: "notice" }, why) : null,
    keyField("api-key", "API key", "For chat: the router's --api-key.", API_KEY),
    keyField(
      "control-key", "Control-plane key",
      "For the fleet, timelines and drains: an admin key of --control-plane-api-keys. Without such keys the API key counts.",
      CONTROL_KEY,
    ),
    el("p", { class: "help" }, "Both stay in this tab and are forgotten when it closes."),
    el(
      "div", { class: "actions" },
      el("button", { value: "cancel", class: "quiet", formnovalidate: true }, "Cancel"),
      el("button", { value: "save" }, "Use these keys"),
    ),
  );
  keysDialog = el("dialog", { "aria-labelledby": "keys-title", id: "keys" }, form);
  const fields = form.querySelectorAll("input");
  // Enter in a field would press the first button, which is Cancel.
  for (const field of fields) {
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      keysDialog.close("save");
    });
  }
  keysDialog.addEventListener("close", () => {
    const [api, control] = [...fields].map((field) => field.value.trim());
    const isSaved = keysDialog.returnValue === "save";
    keysDialog.remove();
    keysDialog = null;
    if (!isSaved) return;
    for (const [name, value] of [[API_KEY, api], [CONTROL_KEY, control]]) {
      if (value) sessionStorage.setItem(name, value);
      else sessionStorage.removeItem(name);
    }
    for (const listener of listeners) listener();
  });
  document.body.append(keysDialog);
  keysDialog.showModal();
}

byId("keys-button")?.addEventListener("click", () => askForKeys());

// ---- requests ----

/** An answer of the router other than 2xx, in its own words. */
export class RouterError extends Error {
  constructor(status, code, message, retryAfterMs) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterMs = retryAfterMs;
  }

  get isAboutKeys() {
    return this.status === 401 || this.status === 403;
  }
}

async function errorOf(response) {
  let code = `status_${response.status}`;
  let message = `the router answered ${response.status}`;
  try {
    const { error } = await response.json();
    code = error.code ?? code;
    message = error.message ?? message;
  } catch {
    message += " without an error object";
  }
  const seconds = Number(response.headers.get("retry-after"));
  return new RouterError(response.status, code, message, seconds > 0 ? seconds * 1000 : 0);
}

/**
 * Asks the router for a path relative to /ui/. `isControl`: the path shows or changes the fleet, so it takes the
 * control-plane key where there is one. Throws RouterError.
 */
export async function ask(path, { isControl = false, headers = {}, ...options } = {}) {
  const key = (isControl && stored(CONTROL_KEY)) || stored(API_KEY);
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, {
    cache: "no-store", credentials: "omit", redirect: "error", ...options, headers: { ...headers, ...authorization },
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Events of a stream as `{event, data}`; comments are left out. EventSource cannot send a key. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let event = { event: "message", data: [] };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n")) >= 0) {
        const line = text.slice(0, end).replace(/\r$/, "");
        text = text.slice(end + 1);
        if (line === "") {
          if (event.data.length) yield { event: event.event, data: event.data.join("\n") };
          event = { event: "message", data: [] };
        } else if (line.startsWith("data:")) event.data.push(line.slice(5).replace(/^ /, ""));
        else if (line.startsWith("event:")) event.event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it has ended, or was aborted
  }
}

/** Shows a message above the page's content; empty text hides it. */
export function notice(text) {
  const box = byId("notice");
  setText(box, text);
  box.hidden = !text;
}

/**
 * Calls `show` with each snapshot of the feed while the page is visible, and `say` with the state of the connection.
 * Connects again after a failure, with growing pauses; after a refusal for the key, when the keys change. A router that
 * accepts connections and sends nothing, because it hangs or the network drops packets, is reported too.
 */
export function followFeed(show, say) {
  let controller = null;
  let timer = 0;
  let watch = 0;
  let pauseMs = 0;
  let shownAt = null;

  const stop = () => {
    clearTimeout(timer);
    clearInterval(watch);
    controller?.abort();
    controller = null;
  };

  const watchSilence = () => {
    let heardAt = performance.now();
    watch = setInterval(() => {
      const silentMs = performance.now() - heardAt;
      if (silentMs >= RECONNECT_MS) start();
      else if (silentMs >= STALE_MS) say(shownAt ? `stale since ${clock(shownAt)}` : "the router does not answer", false);
    }, WATCH_MS);
    return () => {
      heardAt = performance.now();
    };
  };

  const start = async () => {
    stop();
    if (document.hidden) return;
    const mine = new AbortController();
    controller = mine;
    const noteHeard = watchSilence();
    let waitMs = 0;
    try {
      const response = await ask("feed", { isControl: true, signal: mine.signal });
      pauseMs = 0;
      notice("");
      for await (const event of eventsOf(response)) {
        if (event.event !== "snapshot") continue;
        noteHeard();
        shownAt = Date.now();
        say("live", true);
        show(JSON.parse(event.data));
      }
      clearInterval(watch);
      say("the router closed the feed; connecting again", false);
    } catch (error) {
      if (mine.signal.aborted) return;
      clearInterval(watch);
      if (error instanceof RouterError && error.isAboutKeys) {
        say("no access", false);
        notice(error.message);
        askForKeys(error.message);
        return;
      }
      say("not connected", false);
      notice(error instanceof RouterError ? error.message : "The router cannot be reached; trying again.");
      waitMs = error.retryAfterMs ?? 0;
    }
    if (controller !== mine) return;
    pauseMs = Math.min(Math.max(2 * pauseMs, 1000, waitMs), LONGEST_RETRY_MS);
    timer = setTimeout(start, pauseMs);
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      stop();
      say("paused", false);
    } else {
      start();
    }
  });
  onKeys(start);
  start();
}
