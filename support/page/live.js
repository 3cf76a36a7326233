"use strict";
// The form above the viewer: asks the worker to write, and shows each step as it comes.
const {live} = JSON.parse($("data").textContent);  // vocab, and what the worker is told: mask, context, tensors, bytes
const ids = new Map(live.vocab.map((token, id) => [token, id]));
const tokenOf = id => live.vocab[id];
const fields = ["typed", "steps", "temperature", "seed"];
const place = new URL("./", document.baseURI).href;
let worker, ready = false, request = 0, writing = null, last = "";

function say(text, isError = false) {
  $("said").textContent = text;
  $("said").classList.toggle("error", isError);
}

// The ids of what is typed, `mask` in its gaps; a text without gaps gets one up to the context.
function encode(text) {
  const typed = Array.from(text), found = typed.map(c => c === "█" ? live.mask : ids.get(c));
  const i = found.indexOf(undefined), room = live.context - found.length;
  if (i >= 0) throw `The model never saw the character "${typed[i]}" (position ${i + 1}); remove it.`;
  if (room < 0) throw `The text has ${found.length} characters, the model takes ${live.context}; shorten it.`;
  if (found.includes(live.mask)) return found;
  if (room === 0) throw "There is nothing to fill: type _ where a character is missing.";
  return [...found, ...Array(room).fill(live.mask)];
}

const settingsOf = () => Object.fromEntries(fields.map(name => [name, $(name).value]));
const asSample = (given, title) => ({
  title, given: given.map(id => id !== live.mask), tokens: given.map(id => tokenOf(id) ?? ""), frames: [], calls: 0, seconds: 0,
});
const asFrame = drawn => drawn.map(([i, id, p, best]) => [i, tokenOf(id), p, best.map(([other, q]) => [tokenOf(other), q])]);

function show(sample, first) {
  if (!samples[0]?.title) samples.shift();  // the empty one of the beginning
  samples.push(sample);
  samples.splice(0, samples.length - first);
  document.querySelector("footer").hidden = false;
  load(samples.length - 1);
}

function start(isRank) {
  const typed = $("typed").value;
  const said = JSON.stringify(settingsOf());
  if (!isRank && said === last) $("seed").value = (Number($("seed").value) + 1) % 2 ** 32;  // once more: another text
  last = JSON.stringify(settingsOf());
  history.replaceState(null, "", "#" + new URLSearchParams(settingsOf()));
  try {
    const given = encode(typed), seed = Number($("seed").value);
    if (isRank && !typed.includes("█")) throw "There is no gap to rank fills for: type _ where a character is missing.";
    if (samples.at(-1) === writing) samples.pop();  // it is not finished
    writing = isRank ? {given} : asSample(given, `${typed.slice(0, 16).replaceAll("\n", "↵") || "a text"}, seed ${seed}`);
    const how = {seed, steps: Number($("steps").value), temperature: Number($("temperature").value)};
    worker.postMessage({id: ++request, rank: isRank, ids: given, ...how});
    say(isRank ? "trying fills" : "");
    if (isRank) return;
    writing.steps = how.steps;
    show(writing, 9);
    go(0);
    play(true);
    if (innerWidth < 544) $("samples").scrollIntoView();  // on a phone the form hides the text
  } catch (error) {
    say(String(error), true);
  }
}

function receive({data}) {
  if (data.ready) {
    ready = true;
    $("facts").textContent = `${settings.model}, ${data.ready}`;
    say("");
    for (const name of ["write", "rank"]) $(name).disabled = false;
    if (location.hash.length > 1) start(false);
  } else if (data.error) {
    say(data.error, true);
  } else if (data.id !== request) {
    return;
  } else if (data.tried) {
    say(`trying fills: ${data.tried} calls`);
  } else if (data.frame) {
    writing.frames.push(asFrame(data.frame));
    writing.tokens = data.ids.map(id => tokenOf(id) ?? "");
    Object.assign(writing, {steps: data.steps, calls: data.calls, seconds: data.seconds});
    refresh();
  } else if (data.done) {
    writing.steps = writing.frames.length;
    refresh();
    writing = null;
  } else if (data.fills) {
    samples.length = 0;
    for (const {ids, frames, share} of data.fills) {
      const sample = asSample(writing.given), tokens = ids.map(tokenOf);
      const filled = tokens.filter((_, i) => !sample.given[i]).join("");
      show(Object.assign(sample, {tokens, frames: frames.map(asFrame), calls: frames.length, seconds: data.seconds,
                                  title: `${percent(share)} ${filled.replaceAll("\n", "↵")}`}), data.fills.length);
    }
    say("The likeliest of many fills, by the probability of the text from the first gap on.");
    load(0);
    go(1e6);
  }
}

// Show what is new of the text that is being written, and keep what the reader looks at.
function refresh() {
  if (samples[which] !== writing) return;
  const open = cursor;
  load(which);
  point(open);
}

function begin() {
  const given = new URLSearchParams(location.hash.slice(1));
  $("typed").value = live.example;
  for (const name of fields) if (given.has(name)) $(name).value = given.get(name);
  for (const out of document.querySelectorAll("#settings output")) {
    const input = $(out.htmlFor), update = () => { out.value = input.value; };
    input.addEventListener("input", update);
    update();
  }
  for (const name of ["write", "rank"]) $(name).disabled = true;
  document.querySelector("footer").hidden = true;
  $("typed").addEventListener("input", () => {
    const {value, selectionStart} = $("typed");
    if (ids.has("_") || !value.includes("_")) return;
    $("typed").value = value.replaceAll("_", "█");
    $("typed").setSelectionRange(selectionStart, selectionStart);
  });
  $("typed").addEventListener("keydown", e => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) $("composer").requestSubmit(); });
  $("composer").addEventListener("submit", e => { e.preventDefault(); if (ready) start(false); });
  $("rank").addEventListener("click", () => { if ($("composer").reportValidity()) start(true); });
  if (location.protocol === "file:")
    return say("Opened as a file, this page cannot load its model: run `python -m http.server` in its folder, then open "
               + "http://localhost:8000.", true);
  if (!window.WebAssembly || !window.Worker) return say("This browser has no WebAssembly; use a newer one.", true);
  // A worker made of a blob inherits this page's policy: it may connect to nothing but the page's own files.
  const blob = new Blob([`import ${JSON.stringify(`${place}worker.js`)};`], {type: "text/javascript"});
  worker = new Worker(URL.createObjectURL(blob), {type: "module"});
  worker.addEventListener("message", receive);
  worker.addEventListener("error", () => say("worker.js or sampler.js is missing, or this browser is too old for it.", true));
  worker.postMessage({about: {...live, vocab: undefined}, device: given.get("device")});
  say("loading the model");
}

begin();
