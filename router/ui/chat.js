// Chat view: streamed answers, each with a bar of where its time went and why its workers were chosen.

import {
  RouterError, ask, askForKeys, byId, count, el, eventsOf, milliseconds, notice, onKeys, setText,
} from "./app.js";
import { explanationView } from "./explanation.js";
import { decisionsOf, stageBar, tokensText } from "./timeline.js";

/** The bar of a running answer is drawn this often. */
const DRAW_MS = 200;
/** Its timeline is read from the router this often: at first more often, when its stages change. */
const LOOK_MS = 1000;
const FIRST_LOOK_MS = 200;
const FIRST_LOOKS = 5;
/** The timeline ends when the router has dropped the answer: soon after its last byte. */
const LAST_LOOKS = 20;
const LAST_LOOK_MS = 100;

const conversation = [];
let running = null;

// ---- parameters ----

function optionalNumber(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function stopSequences() {
  const lines = byId("stop-text").value.split("\n").filter((line) => line !== "");
  return lines.length ? lines : undefined;
}

/** Tools as the reader wrote them; an empty field is none. Throws SyntaxError. */
function offeredTools() {
  const text = byId("tools").value.trim();
  if (text === "") return undefined;
  const tools = JSON.parse(text);
  return Array.isArray(tools) ? tools : [tools];
}

function bodyFor(messages, isStream) {
  const system = byId("system").value.trim();
  return {
    model: byId("model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number(byId("temperature").value),
    top_p: Number(byId("top_p").value),
    max_tokens: Number(byId("max_tokens").value),
    seed: optionalNumber("seed"),
    stop: stopSequences(),
    tools: offeredTools(),
    ignore_eos: byId("ignore_eos").checked || undefined,
    stream: isStream || undefined,
    stream_options: isStream ? { include_usage: true } : undefined,
  };
}

async function loadModels() {
  const select = byId("model");
  try {
    const { data } = await (await ask("../v1/models")).json();
    const before = select.value;
    select.replaceChildren(...data.map((model) => el("option", { value: model.id }, model.id)));
    if (data.some((model) => model.id === before)) select.value = before;
    notice(data.length ? "" : "No model is served: no worker is ready.");
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  if (!(error instanceof RouterError)) {
    notice("The router cannot be reached.");
    return;
  }
  notice(error.message);
  if (error.isAboutKeys) askForKeys(error.message);
}

function newRequestId() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return `ui-${[...random].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

// ---- messages ----

const WHO = { user: "You", assistant: "Answer", tool: "Result" };
const MESSAGE_HINT = byId("message").placeholder;

function addMessage(role, text) {
  byId("empty").hidden = true;
  const content = el("div", { class: "text", dir: "auto" }, text);
  const item = el("li", { class: `message ${role}` }, el("h2", { class: "who" }, WHO[role]), content);
  byId("messages").append(item);
  return { item, content };
}

/** Scrolls with the text, unless the reader has scrolled up. */
function keepInView(change) {
  const page = document.scrollingElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 80;
  change();
  if (isAtEnd) page.scrollTop = page.scrollHeight;
}

/** One answer: its text, its bar, its facts. */
class Answer {
  constructor() {
    this.id = newRequestId();
    this.text = "";
    this.reasoning = null;
    this.calls = [];
    this.startedAt = performance.now();
    this.firstAt = null;
    this.endedAt = null;
    this.usage = null;
    this.request = null;
    this.timelineProblem = "";
    this.nextLookMs = FIRST_LOOK_MS;
    this.abort = new AbortController();
    const { item, content } = addMessage("assistant", "");
    this.item = item;
    this.content = content;
    this.item.setAttribute("aria-busy", "true");
    this.bar = el("div", { class: "answer-bar" });
    this.factsText = el("span");
    const link = el("a", { href: `./#request=${encodeURIComponent(this.id)}` }, "timeline");
    this.facts = el("p", { class: "help facts-line" }, this.factsText, " · ", link);
    this.why = el("div");
    this.outcome = el("p", { class: "outcome", role: "status" });
    item.append(this.outcome, this.bar, this.facts, this.why);
  }

  get elapsedMs() {
    return (this.endedAt ?? performance.now()) - this.startedAt;
  }

  take(chunk) {
    if (chunk.error) throw new RouterError(200, chunk.error.code, chunk.error.message, 0);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (!content && !reasoning && !calls) return;
    const isFirst = this.firstAt === null;
    this.firstAt ??= performance.now();
    keepInView(() => {
      if (reasoning) this.takeReasoning(reasoning);
      if (content) {
        this.text += content;
        this.content.append(content);
      }
      for (const call of calls ?? []) this.takeCall(call);
    });
    if (!isFirst) return;
    this.show();
    this.nextLookMs = 0; // the router knows the first token too
  }

  /** Reasoning is folded: it is long, and not the answer. */
  takeReasoning(piece) {
    if (this.reasoning === null) {
      this.reasoning = el("div", { class: "text", dir: "auto" });
      this.content.before(el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), this.reasoning));
    }
    this.reasoning.append(piece);
  }

  takeCall({ index, id, function: { name, arguments: piece } }) {
    if (id) {
      const text = el("code", { class: "arguments" });
      const item = el("div", { class: "call" }, el("h3", {}, `Calls ${name}`), el("pre", {}, text));
      this.outcome.before(item);
      this.calls[index] = { id, name, arguments: "", text, item };
    }
    const call = this.calls[index];
    call.arguments += piece;
    call.text.append(piece);
  }

  /** The message as the next request carries it; null if there is none. */
  get message() {
    const calls = this.calls.map(({ id, name, arguments: text }) => (
      { id, type: "function", function: { name, arguments: text } }));
    if (!this.text && !calls.length) return null;
    return { role: "assistant", content: this.text || null, tool_calls: calls.length ? calls : undefined };
  }

  /** A JSON answer is shown indented, and so are the arguments of calls. */
  indent() {
    const shown = [[this.content, this.text], ...this.calls.map((call) => [call.text, call.arguments])];
    for (const [element, text] of shown) {
      const indented = indentedJson(text);
      if (indented !== null) element.replaceChildren(indented);
    }
    if (indentedJson(this.text) !== null) this.content.classList.add("json");
  }

  /** The bar from the router's timeline, or from this page's clock where the timeline is not to be had. */
  show() {
    if (this.request) {
      this.bar.replaceChildren(stageBar(this.request, this.elapsedMs));
    } else {
      const first = this.firstAt === null ? null : this.firstAt - this.startedAt;
      const local = {
        timeline: {}, failed_attempts: [],
        legs: [{ attempt: 1, role: "regular", worker: "", sent_ms: 0, first_token_ms: first, ended_ms: null }],
      };
      this.bar.replaceChildren(stageBar(local, this.elapsedMs));
    }
    const ttft = this.firstAt === null ? null : `TTFT ${milliseconds(this.firstAt - this.startedAt)}`;
    const rate = this.usage && this.firstAt !== null && this.endedAt > this.firstAt
      ? `${count((1000 * this.usage.completion_tokens) / (this.endedAt - this.firstAt))} tokens/s` : null;
    const parts = [milliseconds(this.elapsedMs), ttft, tokensText(this.usage), rate, this.timelineProblem];
    setText(this.factsText, parts.filter(Boolean).join(" · "));
  }

  /** Reads the timeline from the router; false if there is none for this page. */
  async look() {
    try {
      const answer = await ask(`../v1/requests/${encodeURIComponent(this.id)}`, { isControl: true });
      this.request = await answer.json();
      this.timelineProblem = "";
    } catch (error) {
      const isRefused = error instanceof RouterError;
      this.timelineProblem = isRefused && error.isAboutKeys
        ? "stages need the control-plane key" : "the router's timeline is not available";
      return false;
    }
    return true;
  }

  /** Draws the bar until the answer ends, by the timeline of the last look and this page's clock. */
  async follow() {
    let looks = 0;
    while (this.endedAt === null) {
      await new Promise((resolve) => setTimeout(resolve, DRAW_MS));
      if (this.endedAt !== null || document.hidden) continue;
      if (this.elapsedMs >= this.nextLookMs && !this.timelineProblem) {
        looks += 1;
        this.nextLookMs = this.elapsedMs + (looks < FIRST_LOOKS ? FIRST_LOOK_MS : LOOK_MS);
        await this.look();
      }
      if (this.endedAt === null) this.show();
    }
  }

  async end(text) {
    this.endedAt = performance.now();
    this.item.removeAttribute("aria-busy");
    this.content.normalize();
    setText(this.outcome, text);
    for (let looks = 0; looks < LAST_LOOKS && (await this.look()) && this.request.state === "running"; looks += 1) {
      await new Promise((resolve) => setTimeout(resolve, LAST_LOOK_MS));
    }
    this.show();
    const decisions = this.request && decisionsOf(this.request);
    if (decisions) this.why.replaceChildren(decisions);
    this.item.dataset.state = "ended";
  }
}

const FINISHES = { stop: "", length: "Stopped at max tokens.", tool_calls: "Waits for the result of the call." };

/** Objects and arrays, indented; null for other text. */
function indentedJson(text) {
  if (!/^\s*[[{]/.test(text)) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

/** The next message answers these calls, one line for each. */
let openCalls = [];

function showOpenCalls(calls) {
  openCalls = calls;
  const names = calls.map((call) => call.name).join(", ");
  byId("message").placeholder = calls.length
    ? `Result of ${names}${calls.length > 1 ? ", one line for each" : ""}`
    : MESSAGE_HINT;
}

/** The messages that a text of the reader becomes: results of open calls, or a message of the user. */
function messagesOf(text) {
  if (!openCalls.length) return [{ role: "user", content: text }];
  const lines = openCalls.length > 1 ? text.split("\n") : [text];
  return openCalls.map((call, place) => ({ role: "tool", tool_call_id: call.id, content: lines[place] ?? "" }));
}

async function send(text) {
  const sent = messagesOf(text);
  conversation.push(...sent);
  addMessage(openCalls.length ? "tool" : "user", text);
  showOpenCalls([]);
  const answer = new Answer();
  running = answer;
  showRunning();
  answer.show();
  answer.follow();
  answer.item.scrollIntoView({ block: "nearest" });
  let said = "";
  try {
    const response = await ask("../v1/chat/completions", {
      method: "POST", signal: answer.abort.signal, body: JSON.stringify(bodyFor(conversation, true)),
      headers: { "content-type": "application/json", "x-request-id": answer.id, "x-baton-explain": "1" },
    });
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      answer.take(JSON.parse(data));
    }
    said = FINISHES[answer.finish] ?? (answer.finish ? `Ended: ${answer.finish}.` : "The stream ended early.");
  } catch (error) {
    if (answer.abort.signal.aborted) said = "Stopped.";
    else {
      said = error instanceof RouterError ? `${error.code}: ${error.message}` : "The connection to the router broke.";
      answer.item.classList.add("broken");
      if (error instanceof RouterError && error.isAboutKeys) askForKeys(error.message);
    }
  }
  if (answer.message) conversation.push(answer.message);
  else conversation.splice(-sent.length); // no answer: the next message does not carry these
  if (answer.finish === "tool_calls") showOpenCalls(answer.calls);
  answer.indent();
  running = null;
  showRunning();
  await answer.end(said);
}

function showRunning() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("clear").disabled = running !== null;
  setText(byId("live"), running ? "answering" : "");
  byId("live").classList.toggle("on", running !== null);
}

// ---- dry run ----

async function dryRun() {
  const text = byId("message").value.trim() || conversation.findLast((one) => one.role === "user")?.content;
  if (!text) {
    byId("message").focus();
    notice("Write a message first: the dry run says where it would go.");
    return;
  }
  notice("");
  const isNew = byId("message").value.trim() !== "";
  const messages = isNew ? [...conversation, ...messagesOf(text)] : conversation;
  try {
    const response = await ask("../v1/chat/completions", {
      method: "POST", isControl: true, body: JSON.stringify(bodyFor(messages, false)),
      headers: { "content-type": "application/json", "x-baton-explain": "dry-run" },
    });
    const { decisions } = await response.json();
    const views = decisions.map((made) => explanationView(made.explanation, made.worker, made.role));
    byId("dry-run-body").replaceChildren(el("div", { class: "explanations" }, views));
    byId("dry-run").hidden = false;
    byId("dry-run-title").focus();
  } catch (error) {
    complain(error);
  }
}

// ---- form ----

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (running || !text || !byId("parameters").reportValidity()) return;
  byId("message").value = "";
  notice("");
  byId("dry-run").hidden = true;
  send(text);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("parameters").addEventListener("submit", (event) => event.preventDefault());
byId("stop").addEventListener("click", () => {
  running?.abort.abort();
  byId("message").focus();
});
byId("tools").addEventListener("input", (event) => {
  let problem = "";
  try {
    offeredTools();
  } catch (error) {
    problem = `The tools are no JSON: ${error.message}`;
  }
  event.target.setCustomValidity(problem);
});
byId("clear").addEventListener("click", () => {
  conversation.length = 0;
  showOpenCalls([]);
  byId("messages").replaceChildren();
  byId("empty").hidden = false;
  notice("");
  byId("message").focus();
});
byId("why").addEventListener("click", dryRun);
byId("dry-run-close").addEventListener("click", () => {
  byId("dry-run").hidden = true;
  byId("why").focus();
});
onKeys(loadModels);
loadModels();
if (matchMedia("(max-width: 60rem)").matches) byId("parameters-box").open = false;
