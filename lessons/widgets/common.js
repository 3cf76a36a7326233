// What all widgets share: elements, the model, the state in the link, and a frame with labeled controls.
//
// A widget is defined by define(name, {title, about, fields, needsModel, build}). `fields` are its settings with their
// first values; a link holds them: #widget=NAME&FIELD=VALUE... build(widget) adds the controls and returns the function
// that draws it, called again whenever a setting changes; `isOld()`, its argument, tells it to give up.
import {logSoftmax} from "../../support/web/assets/sampler.js";

const widgets = new Map();
export const define = (name, what) => widgets.set(name, what);

// ---- Elements
// h("p", {className: "a"}, "text", element): attributes with a "-" and "role" are set as such, others as properties.
export function h(name, given = {}, ...children) {
  const isSvg = ["svg", "g", "path", "circle", "text", "rect", "line", "title"].includes(name) && given.xml !== false;
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) made.style.setProperty(key, value);
    else if (isSvg || key.includes("-") || key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined));
  return made;
}

export const visible = token => ({" ": "␣", "\n": "↵"})[token] ?? token;
export const percent = p => p >= .995 && p < 1 ? ">99 %" : p < .01 ? "<1 %" : `${Math.round(100 * p)} %`;
export const exact = p => `${Number((100 * p).toPrecision(2))} %`;
export const nats = value => value.toFixed(2);
export const addUp = values => values.reduce((total, value) => total + value, 0);

// The color of the call t of 0 (first) .. 1 (last), as in the viewer.
export const colorOf = t =>
  `oklch(calc(var(--l) + var(--dl) * ${t}) var(--c) calc(var(--h) + var(--dh) * ${t}))`;

// The likeliest tokens as bars; `truth` is marked, and shown even if it is none of them.
export function bars(logp, truth, n = 3) {
  const best = [...logp.keys()].sort((a, b) => logp[b] - logp[a]).slice(0, n);
  if (truth !== undefined && !best.includes(truth)) best.push(truth);
  return h("ul", {className: "bars"}, best.map(id => {
    const p = Math.exp(logp[id]), is = id === truth ? "is-true" : "";
    const li = h("li", {className: is, "--p": p}, h("code", {}, visible(model.vocab[id])), h("span", {}, percent(p)));
    li.dataset.p = p;
    return li;
  }));
}

// ---- The model: one worker for all widgets of the page
export const model = {vocab: [], mask: 0, context: 0, ids: new Map()};
export let predict;  // the logits (L * V) of each row of ids, as model.js has them
let opening = null, page = null;
const listeners = new Set();

// Load the model, once. Throws a sentence for the reader.
export function openModel(tell) {
  listeners.add(tell);
  return opening ??= load();
}

async function load() {
  if (location.protocol === "file:")
    throw "Opened as a file, this page cannot load the model: run python -m http.server in its folder.";
  const place = new URL(document.body.dataset.model, document.baseURI).href;
  const answer = await fetch(place + "index.html").catch(() => ({}));
  if (!answer.ok) throw `The model is missing: ${place} does not answer.`;
  const {live, settings} = JSON.parse(new DOMParser().parseFromString(await answer.text(), "text/html")
    .getElementById("data").textContent);
  Object.assign(model, {vocab: live.vocab, mask: live.mask, context: live.context, end: live.vocab.indexOf("\n")});
  Object.assign(model, {temperature: live.temperature, about: settings.model});
  model.ids = new Map(live.vocab.map((token, id) => [token, id]));
  page = {...live, place, worker: undefined, device: asked.get("device")};
  predict = await startNetwork(page, (...bytes) => listeners.forEach(tell => tell(...bytes)));
}

// The GPT that build.py has put beside the pages, on the runtime of the model, which has the same characters.
// Returns its `predict`, and `parameters`, in millions.
export async function openGPT(tell) {
  const place = new URL(`${document.body.dataset.root}/gpt/`, document.baseURI).href, at = name => place + name;
  const answer = await fetch(at("about.json")).catch(() => ({}));
  if (!answer.ok) throw "The GPT is missing: build the site with --gpt.";
  const {files, vocab, parameters, ...about} = await answer.json();
  if (vocab.join() !== model.vocab.join()) throw "The GPT has other characters than the model.";
  const own = Object.fromEntries(Object.entries(files).map(([name, sum]) => [at(name), sum]));
  const given = {...page, ...about, files: {...page.files, ...own}, network: Object.keys(own)};
  return {predict: await startNetwork(given, tell), parameters};
}

// Start a network in a worker of its own; returns its `predict`.
function startNetwork(about, tell) {
  const worker = new Worker(URL.createObjectURL(new Blob([WORKER], {type: "text/javascript"})), {type: "module"});
  const waiting = new Map();
  let number = 0;
  const look = rows => new Promise((...answer) => {
    waiting.set(++number, answer);
    worker.postMessage({id: number, rows});
  });
  return new Promise((resolve, reject) => {
    worker.onerror = () => reject("The browser does not start the model: it is too old, or something blocks it.");
    worker.onmessage = ({data}) => {
      if (data.total) tell(data.loaded, data.total);
      if (data.ready) resolve(look);
      if (data.error && !waiting.has(data.id)) reject(data.error);
      const [answered, failed] = waiting.get(data.id) ?? [];
      waiting.delete(data.id);
      data.error ? failed?.(data.error) : answered?.(data.logits);
    };
    worker.postMessage({about});
  });
}

// log p (V) of each of some places of one text. look: the `predict` of another network.
export async function logpAt(ids, places, look = predict) {
  const [logits] = await look([ids]), V = model.mask;
  return places.map(i => logSoftmax(logits.subarray(i * V, (i + 1) * V)));
}

// The ids of a text; `gap` characters are masks. Throws a sentence for the reader.
export function encode(text, gap = "") {
  const found = Array.from(text, c => gap.includes(c) ? model.mask : model.ids.get(c)), wrong = found.indexOf(undefined);
  if (wrong >= 0) throw `The model never saw the character “${Array.from(text)[wrong]}”; remove it.`;
  if (found.length > model.context) throw `The model takes ${model.context} characters; shorten the text.`;
  if (!found.length) throw "Type a text.";
  return found;
}

// ---- The frame
const asked = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");

class Widget {
  constructor(name, place) {
    const {title, about, fields, needsModel, build} = widgets.get(name);
    const isAsked = asked.get("widget") === name || !asked.has("widget");
    const given = Object.entries(fields).map(([key, first]) => {
      const value = isAsked ? asked.get(key) : null;
      return [key, value === null ? first : typeof first === "number" ? Number(value) || 0 : value];
    });
    Object.assign(this, {name, needsModel, values: Object.fromEntries(given), runs: 0, timer: 0, noting: 0});
    this.controls = h("div", {className: "controls"});
    this.view = h("div", {className: "view"});
    this.said = h("p", {className: "said", role: "status"});
    const copy = h("button", {type: "button", className: "quiet", onclick: () => this.copy(copy)}, "Copy link");
    const id = `${name}-title`, head = h("div", {className: "head"}, h("h3", {id}, title), copy);
    place.append(head, h("p", {className: "about"}, about), this.controls, this.said, this.view);
    place.setAttribute("role", "group");
    place.setAttribute("aria-labelledby", id);
    this.draw = build(this);
    this.isReady = !needsModel;
    if (this.isReady) this.update();
    else this.loadInSight(place);
    if (asked.get("widget") === name) place.scrollIntoView({behavior: "instant"});
  }

  // A model of many megabytes is loaded only by those who come as far as the widget.
  loadInSight(place) {
    this.say("The model (20 MB with its runtime) loads when you scroll here.");
    const megabytes = bytes => (bytes / 1e6).toFixed(1);
    const tell = (loaded, total) => !this.isReady && this.say(`loading the model: ${megabytes(loaded)} of ${megabytes(total)} MB`);
    const sight = new IntersectionObserver(async ([{isIntersecting}]) => {
      if (!isIntersecting) return;
      sight.disconnect();
      try {
        await openModel(tell);
        this.isReady = true;
        this.update();
      } catch (error) {
        this.say(String(error), true);
      }
    }, {rootMargin: "200px"});
    sight.observe(place);
  }

  say(text, isError = false) {
    this.said.textContent = text;
    this.said.classList.toggle("error", isError);
  }

  // Take a setting, note it in the link, and draw again.
  set(key, value, delay = 0) {
    this.values[key] = value;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.update(), delay);
    clearTimeout(this.noting);  // browsers refuse many changes of the address in a row
    this.noting = setTimeout(() => history.replaceState(null, "", this.link), 400);
  }

  get link() {
    return "#" + new URLSearchParams({widget: this.name, ...this.values});
  }

  async update() {
    if (!this.isReady) return;
    const run = ++this.runs;
    delete this.view.dataset.drawn;
    try {
      await this.draw(() => run !== this.runs);
    } catch (error) {
      if (run !== this.runs) return;
      this.view.replaceChildren();
      this.say(typeof error === "string" ? error : `This failed: ${error}`, true);
    }
    if (run === this.runs) this.view.dataset.drawn = run;
  }

  async copy(button) {
    const address = new URL(this.link, location.href).href;
    history.replaceState(null, "", this.link);
    const isCopied = await navigator.clipboard?.writeText(address).then(() => true, () => false);
    button.textContent = isCopied ? "Copied" : "It is in the address bar";
    setTimeout(() => { button.textContent = "Copy link"; }, 2000);
  }

  // ---- Controls, each with a label. `key`: of the setting that it changes.
  label(text, ...inputs) {
    this.controls.append(h("label", {}, h("span", {}, text), ...inputs));
    return inputs[0];
  }

  text(key, label, given = {}) {
    const value = this.values[key], change = e => this.set(key, e.target.value, 250);
    const input = h(given.rows ? "textarea" : "input", {value, spellcheck: false, autocomplete: "off", oninput: change, ...given});
    return this.label(label, input);
  }

  range(key, label, min, max, step = 1, show = String) {
    const shown = h("output", {}, show(this.values[key]));
    const change = e => {
      shown.textContent = show(Number(e.target.value));
      this.set(key, Number(e.target.value), 40);
    };
    const input = h("input", {type: "range", min, max, step, oninput: change});
    input.value = this.values[key];  // after its bounds
    return this.label(label, input, shown);
  }

  choice(key, label, options) {
    const list = Object.entries(options).map(([value, text]) => h("option", {value}, text));
    const select = h("select", {onchange: e => this.set(key, e.target.value)}, list);
    select.value = this.values[key];
    return this.label(label, select);
  }

  button(label, act, given = {}) {
    const button = h("button", {type: "button", onclick: act, ...given}, label);
    this.controls.append(button);
    return button;
  }
}

// Begin with all widgets of the page; give each block of code a button that copies it.
export function start() {
  for (const place of document.querySelectorAll(".widget")) new Widget(place.dataset.widget, place);
  for (const block of document.querySelectorAll("pre:not(.output)")) {
    const code = block.textContent, button = h("button", {type: "button", className: "copy"}, "Copy");
    button.addEventListener("click", () => navigator.clipboard?.writeText(code).then(() => { button.textContent = "Copied"; }));
    if (navigator.clipboard) block.append(button);
  }
  addEventListener("hashchange", () => { if (location.hash.includes("=")) location.reload(); });  // another link
}
