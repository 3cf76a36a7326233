// Where the page of export.py computes: in a worker of the browser. live_page.py writes into `live` the vocabulary, the
// worker's source, and what the worker needs to load the model.
const ids = new Map(live.vocab.map((token, id) => [token, id]));
const tokenOf = id => live.vocab[id];
// What the user types for a gap: _ or █, unless it is a character of the vocabulary, or [MASK].
const signs = ["_", "█"].filter(c => !ids.has(c)), sign = signs[0] ?? "[MASK]";
const OPEN = "[___]";  // a gap of unknown length
const isText = Array.from(OPEN).every(c => ids.has(c));  // then [___] is text as well
const MOST_TRIED = 16;  // characters of such a gap, as sample.py tries by default
const isGap = part => part === "[MASK]" || part === OPEN || signs.includes(part);
let worker;

// The parts of a text: characters, and signs of gaps. Of [███:PATTERN] and [███|TEXT|TEXT] only the signs are left, of
// [___], [___:PATTERN] and [___|TEXT|TEXT] one OPEN, and the pattern is noted in `matches`. `places` has where each part
// stands.
// Throws a sentence if a bracket is not closed.
function read(text) {
  const parts = [], places = [], matches = [];
  for (let at = 0; at < text.length;) {
    if (!isText && text.startsWith(OPEN, at) && text[at - 1] !== "\\") {
      matches.push({start: parts.length, isOpen: true, isAny: true});
      places.push(at);
      parts.push(OPEN);
      at += OPEN.length;
      continue;
    }
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

// Return the ids of the typed text, with the id of [MASK] in gaps, one for each of unknown length. A text without gaps is
// followed by a gap that fills the context. Throws a sentence for the user if the text cannot be used.
function encode(text) {
  const {parts: typed, places} = read(text), found = typed.map(part => isGap(part) ? live.mask : ids.get(part));
  const i = found.indexOf(undefined), n = typed.filter(part => part !== OPEN).length, room = live.context - n;
  const position = Array.from(text.slice(0, places[i])).length + 1;
  if (i >= 0) throw `The model never saw the character "${typed[i]}" (position ${position}); remove it.`;
  if (room < 0) throw `The text has ${n} characters, the model takes ${live.context}; shorten it.`;
  if (found.includes(live.mask)) return found;
  if (room === 0) throw `There is nothing to fill: type ${sign} where a character is missing.`;
  return [...found, ...Array(room).fill(live.mask)];
}

// Return the gaps that must match, with their automata. Throws a sentence for one that no text of its lengths matches.
const matchesOf = text => read(text).matches.map(({start, length, isOpen, isAny, texts, pattern, shown}) => {
  if (isAny) return {start, isAny, lengths: Array.from({length: MOST_TRIED}, (_, i) => i + 1)};
  const {next, accepts, fits} = toAutomaton(pattern, live.vocab);
  if (isOpen) return {start, next, accepts, ...lengthsOf(texts, fits, shown)};
  if (!fits(length)) throw `No text of ${length} characters of this model matches ${shown}; change one of them.`;
  return {start, length, next, accepts};
});

// Return the lengths that a gap of unknown length may have, and whether it is one of a list of texts.
function lengthsOf(texts, fits, shown) {
  const listed = texts?.map(text => Array.from(text));
  if (listed && !listed.flat().every(c => ids.has(c))) throw `The model never saw all characters of ${shown}; change them.`;
  const lengths = listed?.map(text => text.length) ?? [...Array(MOST_TRIED + 1).keys()].filter(fits);
  if (!lengths.length) throw `No text of up to ${MOST_TRIED} characters of this model matches ${shown}; change it.`;
  return {lengths: [...new Set(lengths)].sort((a, b) => a - b), isList: Boolean(texts)};
}

// Return a text with gaps in segments, as search.js takes them. Throws a sentence if it is too long, or if a gap
// follows one of unknown length.
function segmentsOf(given, matches) {
  const segments = [], starting = new Map(matches.map(match => [match.start, match]));
  for (let i = 0; i < given.length;) {
    const match = starting.get(i), last = segments.at(-1), isMask = given[i] === live.mask;
    if (last?.lengths && isMask)
      throw `A gap must not follow one of unknown length, which could not be told; type ${sign} for each character.`;
    if (match) segments.push(match);
    else if (isMask && last?.isPlain) last.length++;
    else if (isMask) segments.push({length: 1, isPlain: true});
    else if (last?.ids) last.ids.push(given[i]);
    else segments.push({ids: [given[i]]});
    i += match?.length ?? 1;
  }
  const least = segments.reduce((sum, {ids, length, lengths}) => sum + (ids?.length ?? length ?? lengths[0]), 0);
  if (least > live.context)
    throw `The text has at least ${least} characters, the model takes ${live.context}; shorten it.`;
  return segments;
}

const givenOf = found => found.map(id => id !== live.mask);
const tokensOf = found => found.map(id => tokenOf(id) ?? "");
const asFrame = drawn => drawn.map(([i, id, p, best]) => [i, tokenOf(id), p, best.map(([v, q]) => [tokenOf(v), q])]);

// A message of the worker, with texts in place of ids.
function translate({data}) {
  if (data.seen) data = {...data, seen: data.seen.map(id => tokenOf(id) ?? "█").join("")};
  else if (data.frame) data = {...data, frame: asFrame(data.frame)};
  else if (data.given) data = {...data, given: givenOf(data.given), tokens: tokensOf(data.given)};
  else if (data.fills) data = {...data, fills: data.fills.map(({ids, given, frames, ...numbers}) =>
    ({...numbers, tokens: tokensOf(ids), given: givenOf(given), frames: frames.map(asFrame)}))};
  receive(data);
}

const megabytes = bytes => (bytes / 1e6).toFixed(1);
const source = {
  fields: ["typed", "steps", "temperature", "seed"],
  syntax: [
    [signs.at(-1) ?? sign, "one character"],
    ...isText ? [] : [[OPEN, "a gap of any length"]],
    ...ids.has("█") ? [] : [["[___:[a-z]+]", "a gap that must match a pattern"], ["[___|yes|now]", "one of a list"]],
  ],
  help: `${ids.has("█") ? "" : "With ███ for ___ a gap has three characters. "}A text without gaps is continued.`,
  read(typed, how) {
    if (how.fix) return {text: typed, vocab: live.vocab};
    const found = encode(typed), matches = matchesOf(typed);
    if (how.rank && !read(typed).parts.some(isGap))
      throw `There is no gap to rank fills for: type ${sign} for a character.`;
    const isSearched = how.rank || matches.some(match => match.lengths);
    return isSearched ? {segments: segmentsOf(found, matches)} : {ids: found, matches};
  },
  ask(id, {seed, steps, temperature, rank}, text) {
    worker.postMessage({id, rank, seed, steps, temperature, ...text});
  },
  stop(id) {
    worker.postMessage({id, stop: true});
  },
  callsName: "calls, at most",  // a text with few gaps takes fewer
  loading: ({loaded, total}) => loaded < total ? `${megabytes(loaded)} of ${megabytes(total)} MB` : "starting",
  open() {
    if (location.protocol === "file:")
      return giveUp("Opened as a file, this page cannot load its model: run python -m http.server in its folder, then " +
                    "open http://localhost:8000.");
    if (!window.WebAssembly || !window.Worker) return giveUp("This browser has no WebAssembly; use a newer one.");
    // A worker made from a blob inherits this page's policy: it can connect only to the server of this page.
    const blob = new Blob([live.worker], {type: "text/javascript"});
    const refuse = () => giveUp("The browser does not start the model's worker: it is too old, or something blocks " +
                                "it; use Chrome 111, Firefox 114, Safari 16.4 or newer.");
    try {
      worker = new Worker(URL.createObjectURL(blob), {type: "module"});
    } catch {
      return refuse();
    }
    worker.addEventListener("message", translate);
    worker.addEventListener("error", ({message}) => {
      if (!ready) return refuse();
      source.stop(++request);
      receive({error: `The model's worker failed (${message || "no reason is given"}); try again, or reload the page.`});
    });
    const place = new URL("./", document.baseURI).href;
    const about = {...live, end: ids.get("\n") ?? null, place, vocab: undefined, worker: undefined};
    worker.postMessage({about, device: link.get("device")});
    say("loading the model");
  },
};
