// The form above the viewer. It asks the worker to write a text and shows each step as it arrives. live_page.py writes
// `live` into the page: the vocabulary, the worker's source, and what the worker needs to load the model.
const ids = new Map(live.vocab.map((token, id) => [token, id]));
const tokenOf = id => live.vocab[id];
// What the user types for a gap: _ or █, unless it is a character of the vocabulary, or [MASK].
const signs = ["_", "█"].filter(c => !ids.has(c)), sign = signs[0] ?? "[MASK]";
const OPEN = "[___]";  // a gap of unknown length
const MOST_TRIED = 16;  // characters of such a gap, as sample.py tries by default
const isGap = part => part === "[MASK]" || part === OPEN || signs.includes(part);
// The parts of a text: characters, and signs of gaps. Of [███:PATTERN] and [███|TEXT|TEXT] only the signs are left, of
// [___:PATTERN] and [___|TEXT|TEXT] one OPEN, and the pattern is noted in `matches`. `places` has where each part stands.
// Throws a sentence if a bracket is not closed.
function read(text) {
  const parts = [], places = [], matches = [];
  for (let at = 0; at < text.length;) {
    const opening = /^\[(█+|___)([:|])/.exec(text.slice(at));
    if (!opening || ids.has("█") || text[at - 1] === "\\") {
      const [part] = text.slice(at).match(/^(?:\[MASK\]|[^])/u);
      parts.push(part);
      places.push(at);
      at += part.length;
      continue;
    }
    const from = at + opening[0].length, end = endOf(text, from, opening[2] === ":"), inner = text.slice(from, end);
    if (end < 0) throw `The gap ${text.slice(at, at + 20)} has no ] at its end; write one.`;
    const texts = opening[2] === "|" ? toTexts(inner) : null, pattern = texts ? toPattern(inner) : inner;
    const isOpen = opening[1] === "___", length = isOpen ? 1 : opening[1].length;
    matches.push({start: parts.length, length, isOpen, texts, pattern, shown: inner});
    for (let i = 1; i <= length; i++) places.push(at + i) && parts.push(isOpen ? OPEN : "█");
    at = end + 1;
  }
  return {parts, places, matches};
}

// Where the ] stands that closes a gap, outside of a character class of its pattern; -1 if there is none.
function endOf(text, from, isPattern) {
  for (let i = from, inClass = false; i < text.length; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "]" && !inClass) return i;
    else if (text[i] === "]") inClass = false;
    else if (text[i] === "[" && isPattern && !inClass) {
      inClass = true;
      i += /^\^?\]?/.exec(text.slice(i + 1))[0].length;
    }
  }
  return -1;
}
const split = text => read(text).parts;
const fields = ["typed", "steps", "temperature", "seed"];
const link = new URLSearchParams(location.hash.slice(1));
let worker, ready = false, request = 0, writing = null, last = "", doing = "";
let proof = null;  // a text that is proofread: {text, parts}, parts of proofread.js, with `isTaken` once that is decided

function say(text, isError = false) {
  $("said").textContent = text;
  $("said").classList.toggle("error", isError);
}

// Return the ids of the typed text, with the id of [MASK] in gaps, one for each of unknown length. A text without gaps is
// followed by a gap that fills the context. Throws a sentence for the user if the text cannot be used.
function encode(text) {
  const {parts: typed, places} = read(text), found = typed.map(part => isGap(part) ? live.mask : ids.get(part));
  const i = found.indexOf(undefined), n = typed.filter(part => part !== OPEN).length, room = live.context - n;
  if (/\[___\]/.test(text) && !["[", "_", "]"].every(c => ids.has(c)))
    throw `[___], a gap of unknown length, is for sample.py --infill; here type ${sign} for each character.`;
  const position = Array.from(text.slice(0, places[i])).length + 1;
  if (i >= 0) throw `The model never saw the character "${typed[i]}" (position ${position}); remove it.`;
  if (room < 0) throw `The text has ${n} characters, the model takes ${live.context}; shorten it.`;
  if (found.includes(live.mask)) return found;
  if (room === 0) throw `There is nothing to fill: type ${sign} where a character is missing.`;
  return [...found, ...Array(room).fill(live.mask)];
}

// Return the gaps that must match, with their automata. Throws a sentence for one that no text of its lengths matches.
const matchesOf = text => read(text).matches.map(({start, length, isOpen, texts, pattern, shown}) => {
  const {next, accepts, fits} = toAutomaton(pattern, live.vocab);
  if (isOpen) return {start, next, accepts, ...lengthsOf(texts, fits, shown)};
  if (!fits(length)) throw `No text of ${length} characters of this model matches ${shown}; change one of them.`;
  return {start, length, next, accepts};
});

// Return what is tried at a gap of unknown length: {least, lengths, texts}, the texts of a list as ids, or null.
function lengthsOf(texts, fits, shown) {
  const known = texts?.map(text => Array.from(text, c => ids.get(c))).filter(text => !text.includes(undefined)) ?? null;
  const lengths = known?.map(text => text.length) ?? [...Array(MOST_TRIED + 1).keys()].filter(fits);
  if (!lengths.length) throw texts ? `The model never saw the characters of ${shown}; change them.`
    : `No text of up to ${MOST_TRIED} characters of this model matches ${shown}; change it.`;
  return {least: Math.min(...lengths), lengths, texts: known};
}

// Return a text with gaps of unknown length in segments, as search.js takes them. Throws a sentence if it is too long, or
// if a gap follows such a one.
function segmentsOf(given, matches) {
  const segments = [], starting = new Map(matches.map(match => [match.start, match]));
  for (let i = 0; i < given.length;) {
    const match = starting.get(i), last = segments.at(-1), isMask = given[i] === live.mask;
    if (last?.least !== undefined && isMask)
      throw `A gap must not follow one of unknown length, which could not be told; type ${sign} for each character.`;
    if (match) segments.push(match);
    else if (isMask && last?.isPlain) last.length++;
    else if (isMask) segments.push({length: 1, isPlain: true});
    else if (last?.ids) last.ids.push(given[i]);
    else segments.push({ids: [given[i]]});
    i += match?.length ?? 1;
  }
  const least = segments.reduce((sum, segment) => sum + (segment.ids?.length ?? segment.length ?? segment.least), 0);
  if (least > live.context)
    throw `The text has at least ${least} characters, the model takes ${live.context}; shorten it.`;
  return segments;
}

const megabytes = bytes => (bytes / 1e6).toFixed(1);
const settingsOf = () => Object.fromEntries(fields.map(name => [name, $(name).value]));
const asSample = (given, title) => ({
  title, given: given.map(id => id !== live.mask), tokens: given.map(id => tokenOf(id) ?? ""), frames: [],
});
const asFrame = drawn => drawn.map(([i, id, p, best]) => [i, tokenOf(id), p, best.map(([v, q]) => [tokenOf(v), q])]);

function show(sample, first) {
  if (!samples[0]?.title) samples.shift();  // the page begins with an empty sample
  samples.push(sample);
  samples.splice(0, samples.length - first);
  document.querySelector("footer").hidden = false;
  list();
  load(samples.length - 1);
}

// End what is being written: a text that is shown stays as it is.
function stopWriting() {
  if (writing && samples.at(-1) === writing) receive({data: {id: request, done: true}});
  writing = null;
}

// Find mistakes in the typed text, and offer what to write there.
function proofread() {
  const text = $("typed").value;
  if (!text) return say("There is nothing to proofread: type a text.", true);
  stopWriting();
  endProof();
  proof = {text, parts: []};
  doing = "proofreading";
  worker.postMessage({id: ++request, text, vocab: live.vocab});
  say(doing);
}

// Remove what was found. The text stays, with the changes that were accepted.
function endProof() {
  if (!proof) return;
  worker.postMessage({id: ++request});  // it may still be looking
  proof = null;
  $("proof").hidden = true;
  $("proof").replaceChildren();
}

// Show the parts of a window: what is kept as it is, a change with its buttons.
function showParts(parts) {
  $("proof").hidden = false;
  for (const part of parts) {
    proof.parts.push(part);
    const {before, after, change} = part;
    if (!change) {
      $("proof").append(before);
      continue;
    }
    const {kind, gain, pBefore, pAfter} = change, node = make("span", "", "change"), shown = c => c.replaceAll("\n", "↵");
    const p = (name, value) => value === null ? "" : `, ${name} ${percent(value)}`;
    node.title = `${kind}: ${gain.toFixed(1)} nats likelier${p("before", pBefore)}${p("after", pAfter)}`;
    if (before) node.append(make("del", shown(before)));
    if (after) node.append(make("ins", shown(after)));
    for (const [sign, name, isTaken] of [["✓", "Accept", true], ["✗", "Reject", false]]) {
      const button = make("button", sign);
      button.type = "button";
      button.setAttribute("aria-label", `${name}: ${shown(before) || "nothing"} becomes ${shown(after) || "nothing"}`);
      button.addEventListener("click", () => decide(part, node, isTaken));
      node.append(button);
    }
    $("proof").append(node);
  }
}

// Accept or reject a change: the typed text has it, or has not.
function decide(part, node, isTaken) {
  part.isTaken = isTaken;
  const next = [...$("proof").querySelectorAll("button")].find(button =>
    node.compareDocumentPosition(button) & Node.DOCUMENT_POSITION_FOLLOWING && !node.contains(button));
  node.replaceWith(isTaken ? part.after : part.before);
  next?.focus();
  const {text, parts} = proof, read = parts.reduce((sum, {before}) => sum + before.length, 0);
  const whole = parts.map(({before, after, isTaken}) => isTaken ? after : before).join("") + text.slice(read);
  $("typed").value = whole;
}

function start(isRank) {
  endProof();
  const typed = $("typed").value;
  const said = JSON.stringify(settingsOf());
  if (!isRank && said === last) $("seed").value = (Number($("seed").value) + 1) % 2 ** 32;  // repeated: another seed
  try {
    const given = encode(typed), matches = matchesOf(typed), seed = Number($("seed").value);
    const segments = matches.some(match => match.lengths) ? segmentsOf(given, matches) : null;
    if (isRank && !split(typed).some(isGap)) throw `There is no gap to rank fills for: type ${sign} for a character.`;
    if (!isRank) last = JSON.stringify(settingsOf());
    history.replaceState(null, "", "#" + new URLSearchParams({...Object.fromEntries(link), ...settingsOf()}));
    if (samples.at(-1) === writing) isRank ? receive({data: {id: request, done: true}}) : samples.pop();  // unfinished
    const title = `${typed.slice(0, 16).replace(/\n/g, "↵") || "text"}, seed ${seed}`;
    const how = {seed, steps: Number($("steps").value), temperature: Number($("temperature").value)};
    writing = {given, title};
    if (segments) worker.postMessage({id: ++request, rank: isRank, segments, end: ids.get("\n") ?? null, ...how});
    else worker.postMessage({id: ++request, rank: isRank, ids: given, matches, ...how});
    doing = isRank || segments ? "trying fills" : "";
    say(doing);
    if (!isRank && !segments) present(given, how.steps);
  } catch (error) {
    say(String(error), true);
  }
}

// Show the text that is going to be written, with the id of [MASK] in its gaps.
function present(given, steps) {
  writing = Object.assign(asSample(given, writing.title), {steps, calls: 0, seconds: 0});
  show(writing, 9);
  go(0);
  play(true);
  if (innerWidth < 544 || innerHeight < 600) document.querySelector("main").scrollIntoView();  // the form hides it
}

function receive({data}) {
  if (data.ready) {
    ready = true;
    $("facts").textContent = `${settings.model}, ${data.ready}`;
    say("");
    for (const name of ["write", "rank", "fix"]) $(name).disabled = false;
    if (fields.some(name => link.has(name)) && $("composer").reportValidity()) start(false);
  } else if (data.total) {
    say(`loading the model and what runs it: ${megabytes(data.loaded)} of ${megabytes(data.total)} MB`);
  } else if (data.error) {
    say(data.error, true);
  } else if (data.id !== request) {
    return;
  } else if (data.tried && !data.fills) {
    say(`${doing}: ${data.tried} texts shown to the network`);
  } else if (data.parts) {
    showParts(data.parts);
  } else if (data.isFixed) {
    const n = proof.parts.filter(({change}) => change).length;
    if (!n) endProof();
    say(n ? `${n} ${n === 1 ? "change" : "changes"} proposed: accept (✓) or reject (✗) each.` : "No mistake was found.");
  } else if (data.given) {  // the gaps have their likeliest lengths
    say("");
    present(data.given, data.steps);
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
    for (const {ids, given, frames, share} of data.fills) {
      const sample = asSample(given), tokens = ids.map(tokenOf);
      const filled = tokens.map((t, i) => sample.given[i] ? "\0" : t).join("").split(/\0+/).filter(Boolean).join("…");
      show(Object.assign(sample, {tokens, frames: frames.map(asFrame), calls: data.tried, seconds: data.seconds,
                                  title: `${percent(share)} ${filled.replaceAll("\n", "↵")}`}), data.fills.length);
    }
    say("The likeliest of many fills, by the probability of the text from the first gap on.");
    load(0);
    go(1e6);
  }
}

// Update the text that is being written, if it is shown, and keep its tooltip open.
function refresh() {
  if (samples[which] !== writing) return;
  const open = cursor;
  load(which);
  point(open);
}

function begin() {
  $("facts").textContent = settings.model;
  $("signs").textContent = signs.join(" or ") || sign;
  $("patterns").hidden = ids.has("█");
  $("typed").value = live.example;
  for (const name of fields) if (link.has(name)) $(name).value = link.get(name);
  addEventListener("hashchange", () => location.reload());  // the user opened another link to this page
  for (const out of document.querySelectorAll("#settings output")) {
    const input = $(out.htmlFor), update = () => { out.value = input.value; };
    input.addEventListener("input", update);
    update();
  }
  for (const name of ["write", "rank", "fix"]) $(name).disabled = true;
  document.querySelector("footer").hidden = true;
  const isDone = e => e.key === "Enter" && (e.ctrlKey || e.metaKey);
  $("typed").addEventListener("keydown", e => isDone(e) && $("composer").requestSubmit());
  $("composer").addEventListener("submit", e => { e.preventDefault(); if (ready) start(false); });
  $("rank").addEventListener("click", () => { if ($("composer").reportValidity()) start(true); });
  $("fix").addEventListener("click", proofread);
  $("typed").addEventListener("input", () => {
    if (proof) say("");
    endProof();
  });
  if (location.protocol === "file:")
    return say("Opened as a file, this page cannot load its model: run python -m http.server in its folder, then open " +
               "http://localhost:8000.", true);
  if (!window.WebAssembly || !window.Worker) return say("This browser has no WebAssembly; use a newer one.", true);
  // A worker made from a blob inherits this page's policy: it can connect only to the server of this page.
  const blob = new Blob([live.worker], {type: "text/javascript"});
  const refuse = () => say("The browser does not start the model's worker: it is too old, or something blocks it; " +
                           "use Chrome 111, Firefox 114, Safari 16.4 or newer.", true);
  try {
    worker = new Worker(URL.createObjectURL(blob), {type: "module"});
  } catch {
    return refuse();
  }
  worker.addEventListener("message", receive);
  worker.addEventListener("error", refuse);
  const place = new URL("./", document.baseURI).href;
  worker.postMessage({about: {...live, place, vocab: undefined, worker: undefined}, device: link.get("device")});
  say("loading the model and what runs it");
}

begin();
