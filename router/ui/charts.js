// Charts of the last ten minutes, drawn from the history in the router's snapshots.

import { byId, clock, count, el, milliseconds, percent, setText } from "./app.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 40;

const perSecond = (value) => (value !== null && value !== undefined && value < 100 && value > 0 ? value.toPrecision(2).replace(/\.0$/, "") : count(value));

/** Charts with their lines: column of the history, name, style. `max`: upper end of the axis, else the largest value. */
const CHARTS = [
  { id: "requests", title: "Requests/s", format: perSecond, lines: [["requests_per_s", "", "decode"]] },
  { id: "errors", title: "Errors/s", format: perSecond, lines: [["errors_per_s", "", "failed"]] },
  { id: "ttft", title: "TTFT", format: milliseconds, lines: [["ttft_p50_ms", "p50", "decode"], ["ttft_p95_ms", "p95", "prefill"]] },
  {
    id: "tokens", title: "Tokens/s", format: count,
    lines: [["prefill_tokens_per_s", "prefill", "prefill"], ["decode_tokens_per_s", "decode", "decode"]],
  },
  {
    id: "kv", title: "KV use", format: percent, max: 1,
    lines: [["prefill_kv_usage", "prefill", "prefill"], ["decode_kv_usage", "decode", "decode"]],
  },
];

const shown = new Map();
let history = null;
/** Sample under the pointer; null: the last one. */
let pointed = null;

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Place of a sample from the left; the last one is at the right edge. */
const placeOf = (index) => WIDTH * (1 - (history.requests_per_s.length - 1 - index) / (history.max_samples - 1));

function makeChart({ id, title, lines }) {
  const values = lines.map(([, name, style]) => {
    const value = el("span", { class: "value" });
    const label = name ? el("span", { class: "line-name" }, el("span", { class: `chip ${style}`, "aria-hidden": "true" }), name) : null;
    return { value, item: el("span", { class: "reading" }, label, value) };
  });
  const paths = lines.map(([, , style]) => svg("path", { class: `line ${style}` }));
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT });
  const drawing = svg(
    "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, cursor, ...paths,
  );
  drawing.addEventListener("pointermove", (event) => pointAt(drawing, event));
  drawing.addEventListener("pointerleave", () => {
    pointed = null;
    showReadings();
  });
  const top = el("span", { class: "axis-top help" });
  const figure = el(
    "figure", { class: "chart", "data-chart": id },
    el("figcaption", {}, el("span", { class: "chart-title" }, title), top),
    el("p", { class: "readings" }, values.map(({ item }) => item)),
    drawing,
  );
  byId("charts").append(figure);
  return { figure, drawing, paths, cursor, top, values: values.map(({ value }) => value), items: values.map(({ item }) => item) };
}

function pointAt(drawing, event) {
  if (!history) return;
  const box = drawing.getBoundingClientRect();
  const fromEnd = Math.round((1 - (event.clientX - box.left) / box.width) * (history.max_samples - 1));
  const last = history.requests_per_s.length - 1;
  pointed = Math.min(Math.max(last - fromEnd, 0), last);
  showReadings();
}

/** SVG path of a column, with a gap where there is no value. A value between two gaps is a dot. */
function pathOf(column, max) {
  let isDrawing = false;
  const parts = [];
  column.forEach((value, index) => {
    if (value === null) {
      isDrawing = false;
      return;
    }
    const x = placeOf(index).toFixed(1);
    const y = (HEIGHT - 1.5 - (HEIGHT - 3) * Math.min(value / max, 1)).toFixed(1);
    parts.push(isDrawing ? `L${x} ${y}` : `M${x} ${y}h0.01`);
    isDrawing = true;
  });
  return parts.join("");
}

/** Numbers beside the charts: of the sample under the pointer, or the last one. */
function showReadings() {
  const last = history.requests_per_s.length - 1;
  const index = Math.min(pointed ?? last, last);
  const ended = history.ended_unix_ms - (last - index) * history.period_ms;
  setText(byId("history-time"), pointed === null ? `means of ${history.period_ms / 1000} s` : clock(ended));
  for (const chart of CHARTS) {
    const { values, cursor } = shown.get(chart.id);
    chart.lines.forEach(([column], number) => setText(values[number], chart.format(history[column][index] ?? null)));
    cursor.classList.toggle("on", pointed !== null);
    cursor.setAttribute("x1", placeOf(index).toFixed(1));
    cursor.setAttribute("x2", placeOf(index).toFixed(1));
  }
}

function spokenText(chart, lines) {
  const texts = lines.map(([column, name]) => {
    const known = history[column].filter((value) => value !== null);
    if (!known.length) return `${name} not known`;
    const highest = Math.max(...known);
    return `${name} now ${chart.format(history[column].at(-1))}, highest ${chart.format(highest)}`;
  });
  return `${chart.title}: ${texts.join("; ").trim()}`;
}

/** Draws the history of a snapshot. */
export function showHistory(fleet) {
  history = fleet.history;
  const isEmpty = !history.requests_per_s.length;
  byId("history").hidden = isEmpty;
  if (isEmpty) return;
  for (const chart of CHARTS) {
    if (!shown.has(chart.id)) shown.set(chart.id, makeChart(chart));
    const { figure, drawing, paths, top, items } = shown.get(chart.id);
    const known = chart.lines.flatMap(([column]) => history[column]).filter((value) => value !== null);
    const highest = Math.max(...known, 0);
    const max = chart.max ?? (highest || 1);
    chart.lines.forEach(([column], number) => {
      // Regular workers count as decode workers; a line of a role that the fleet lacks is not named.
      const isUsed = history[column].some((value) => value !== null);
      items[number].hidden = chart.lines.length > 1 && !isUsed && known.length > 0;
      paths[number].setAttribute("d", pathOf(history[column], max));
    });
    drawing.setAttribute("aria-label", spokenText(chart, chart.lines));
    setText(top, known.length ? `max ${chart.format(highest)}` : "");
    figure.classList.toggle("bad", chart.id === "errors" && history.errors_per_s.at(-1) > 0);
  }
  showReadings();
}
