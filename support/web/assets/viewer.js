// Replays texts step by step: on the page of sample.py --html, and below the form of live.js.
import {crc32} from "./crc.js";

const $ = id => document.getElementById(id);

// Show an error instead of the page, and stop the script.
function fail(sentence) {
  Object.assign($("notice"), {textContent: sentence}).style.animation = "none";
  throw new Error(sentence);
}

// Return the data in the page, after checking that they are complete and unchanged.
function readData() {
  const {textContent, dataset} = $("data");
  if (crc32(new TextEncoder().encode(textContent)) !== Number(dataset.crc32))
    fail("This page is damaged: its data are not those that were written. Load it again, or write it again.");
  return JSON.parse(textContent);
}

const {samples, settings, live} = readData();
const make = (tag, textContent = "", className = "") =>
  Object.assign(document.createElement(tag), {textContent, className});
const count = (n, name) => `${n} ${name}${n === 1 ? "" : "s"}`;
const percent = p => (p > 0 && p < .005 ? "<\u00a01" : Math.round(100 * p)) + "\u00a0%";
const color = t => `oklch(calc(var(--l) + var(--dl) * ${t}) var(--c) calc(var(--h) + var(--dh) * ${t}))`;

let which = 0, step = 0, timer = 0, cursor = -1;  // cursor: the token whose tooltip is open, or -1
let settling = 0, settled = false;  // settled: the newest tokens are no longer marked, so what is left is the text
const SETTLE = 1000;  // milliseconds that the marks stay of the last step, and of one that plays
let sample, steps, spans, events;

// The token at a position and step depends only on the events of that position, so the viewer can jump to any step.
const eventAt = (p, s) => events[p].findLast(e => e.step <= s);
const tokenAt = (p, s) => sample.given[p] ? sample.tokens[p] : eventAt(p, s)?.token ?? null;
const scale = s => steps > 1 ? (s - 1) / (steps - 1) : 0;

function load(i) {
  which = (i + samples.length) % samples.length;
  sample = samples[which];
  steps = sample.planned ?? sample.frames.length;  // a text that is being written has steps to come
  events = sample.tokens.map(() => []);
  sample.frames.forEach((frame, s) => frame.forEach(([p, token, confidence, alternatives]) => {
    const last = events[p].at(-1), same = last?.token === token;  // if drawn again: the same token, or another
    events[p].push({step: s + 1, token, confidence, alternatives, since: same ? last.since : s + 1,
                    old: same ? last.old : last?.token});
  }));
  spans = sample.tokens.map((token, p) => {
    const span = make("span", "", "t");
    span.dataset.p = p;
    span.dataset.ghost = token.replaceAll("\n", "x") || "x";
    return span;
  });
  $("text").replaceChildren(...spans.flatMap((span, p) =>
    [span, ...Array.from(sample.tokens[p].matchAll("\n"), () => make("br"))]));
  [...$("samples").children].forEach((b, k) => b.setAttribute("aria-pressed", k === which));
  const size = sample.tokens.reduce((n, token) => n + Math.max(1, token.length), 0);
  $("text").style.setProperty("--zoom", Math.max(1, Math.min(2, 16 / Math.sqrt(size))));  // enlarge short texts
  $("slider").max = steps;
  const calls = sample.share === undefined ? count(sample.calls, "network call")
    : `${count(sample.calls, "text")} seen for ${count(samples.length, "fill")}`;  // they were searched together
  $("calls").textContent = sample.note ?? `${calls}, ${sample.seconds.toFixed(1)} s`;
  $("bold").textContent = sample.given.includes(true) ? "; bold: given" : "";
  point(-1);
  go(Math.min(step, steps));
}

// Show a button for each sample.
function list() {
  $("samples").replaceChildren(...samples.map((s, i) => {
    const button = make("button", s.title);
    button.addEventListener("click", () => load(i));
    return button;
  }));
}

function draw(p) {
  const token = tokenAt(p, step), event = eventAt(p, step), given = sample.given[p];
  const fresh = !settled && event?.since === step, changed = fresh && event.old !== undefined;
  const [head, ...lines] = (token ?? "").split("\n");
  spans[p].replaceChildren(head, ...lines.flatMap(text => [make("i", "\n", "nl"), text]));
  const classes = {given, mask: token === null, fresh, changed};
  spans[p].className = ["t", ...Object.keys(classes).filter(name => classes[name])].join(" ");
  const own = token === null || given ? "" : color(scale(event.since));
  spans[p].style.color = own;
  spans[p].style.setProperty("--color", own);
}

function go(s) {
  step = Math.max(0, Math.min(steps, Math.round(s) || 0));
  settled = false;
  clearTimeout(settling);
  if (step === steps || timer) settling = setTimeout(settle, SETTLE);  // not of a step that the user stopped at
  spans.forEach((_, p) => draw(p));
  const gaps = events.filter((_, p) => !sample.given[p]);
  const past = gaps.map(all => all.filter(e => e.step <= step));
  const changes = past.flat().filter(e => e.since === e.step && e.old !== undefined).length;
  $("where").textContent = `Step ${step} of ${steps}`;
  $("revealed").textContent = `${past.filter(all => all.length).length} of ${gaps.length} revealed, ${count(changes, "change")}`;
  $("slider").value = step;
  $("slider").style.setProperty("--now", step ? color(scale(step)) : "var(--soft)");
  $("text").setAttribute("aria-label", `Step ${step} of ${steps}: ${text().replace(/█+/g, "…")}`);
  if (cursor >= 0) point(cursor);
}

function settle() {
  settled = true;
  spans.forEach((_, p) => draw(p));
  if (cursor >= 0) point(cursor);
}

const text = () => spans.map(span => span.classList.contains("mask") ? "█" : span.textContent).join("");

function play(on) {
  clearInterval(timer);
  timer = 0;
  if (!on && step < steps) clearTimeout(settling);
  if (on && step === steps) go(0);
  const next = () => {
    if (step < sample.frames.length) go(step + 1);
    if (step === steps) play(false);
  };
  if (on) timer = setInterval(next, Math.max(40, Math.min(500, 9000 / steps)));
  $("play").textContent = on ? "Pause" : "Play";
}

const jump = s => { play(false); go(s); };

// Open the tooltip of a token; -1 closes it.
function point(p) {
  document.querySelector(".cursor")?.classList.remove("cursor");
  cursor = p in spans ? p : -1;
  $("tip").hidden = cursor < 0;
  if (cursor < 0) return;
  const visible = t => t.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
  const token = tokenAt(p, step), event = eventAt(p, step), given = sample.given[p];
  const was = event?.old === undefined ? "" : `, before: ${visible(event.old)}`;
  const about = given ? "given" : !event ? "masked"
    : `step ${event.since}${was}${event.confidence == null ? "" : `, confidence ${percent(event.confidence)}`}`;
  const head = make("p", about);
  if (token !== null) head.prepend(make("b", visible(token)), " ");
  const rows = (given || !event ? [] : event.alternatives ?? []).map(([other, share]) => {
    const row = make("div", "", other === token ? "taken" : "");
    row.append(make("code", visible(other)), make("span", percent(share)));
    return row;
  });
  spans[p].classList.add("cursor");
  $("tip").style.setProperty("--color", token === null || given ? "var(--ink)" : color(scale(event.since)));
  $("tip").replaceChildren(head, ...rows);
  const box = spans[p].getBoundingClientRect(), {offsetWidth: w, offsetHeight: h} = $("tip");
  const left = Math.max(8, Math.min(innerWidth - w - 8, box.left + box.width / 2 - w / 2));
  const top = box.top > h + 16 ? box.top - h - 10 : box.bottom + 10;
  $("tip").style.transform = `translate(${left}px, ${top}px)`;
}

const under = e => { const t = e.target.closest(".t"); point(t ? Number(t.dataset.p) : -1); };
$("text").addEventListener("pointerover", e => { if (e.pointerType === "mouse") under(e); });
$("text").addEventListener("pointerleave", e => { if (e.pointerType === "mouse") point(-1); });
$("text").addEventListener("click", under);
addEventListener("scroll", () => { if (cursor >= 0) point(cursor); }, {passive: true});
$("play").addEventListener("click", () => play(!timer));
$("slider").addEventListener("input", () => jump(Number($("slider").value)));
// Remove the focus from a button after a click: otherwise the space bar would press it again.
document.addEventListener("click", e => { if (e.detail) e.target.closest("button")?.blur(); });
document.addEventListener("keydown", e => {
  const typing = e.target.closest("textarea, form input") || (e.key === " " && e.target.closest("button"));
  if (e.ctrlKey || e.metaKey || e.altKey || typing) return;
  const act = {
    ArrowLeft: () => jump(step - 1), ArrowRight: () => jump(step + 1),
    Home: () => jump(0), End: () => jump(steps), " ": () => play(!timer), Escape: () => point(-1),
    ArrowUp: () => load(which - 1), ArrowDown: () => load(which + 1),
    "[": () => point(cursor - 1), "]": () => point(cursor + 1),
  }[e.key];
  if (act) { e.preventDefault(); act(); }
});

$("facts").textContent = Object.entries(settings).map(([name, value]) => `${name} ${value}`).join(", ");
list();
load(0);
if (!live) {  // a page of finished texts plays the first one, once
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  still ? go(steps) : play(true);
}
