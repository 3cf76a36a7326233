// Regular expressions as automata over the characters of a vocabulary, for gaps that must match: the part of the dialect
// of sample.py that a page needs. A pattern matches a whole gap.

const MOST_POSITIONS = 2000, MOST_STATES = 2000;
const CLASSES = {
  d: "\\p{Nd}", w: "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}", s: "\\p{White_Space}",
};
const CONTROLS = {n: "\n", r: "\r", t: "\t", f: "\f", v: "\v", a: "\x07"};

// Return {next, accepts, fits}. next: Int32Array (states x characters), the state after a character, -1 if nothing that
// begins so matches. accepts: Uint8Array of the states. fits(n): whether a text of n characters matches. State 0 is the
// first. Throws a sentence for the user.
export function toAutomaton(pattern, vocab) {
  const shown = JSON.stringify(pattern.slice(0, 40)), signs = [...pattern], V = vocab.length;
  const fail = why => { throw `${shown} is no pattern that this page takes: ${why}.`; };
  let at = 0, positions = 0;
  const follow = [], characters = [];  // of each position: those that may come next, and its characters

  // ---- Reading. A node is a function that adds its positions and returns {empty, first, last}.
  const quoted = c => `\\u{${c.codePointAt(0).toString(16)}}`;

  function escaped() {  // after a backslash: the source of a character or of a class, as JavaScript has it
    const c = signs[at++] ?? fail("it ends with a backslash");
    if (c.toLowerCase() in CLASSES) return c in CLASSES ? CLASSES[c] : `[^${CLASSES[c.toLowerCase()]}]`;
    if (c in CONTROLS) return quoted(CONTROLS[c]);
    const code = /^(?:x([0-9a-f]{2})|u([0-9a-f]{4})|[xu]\{([0-9a-f]{1,6})\})/i.exec(signs.slice(at - 1, at + 9).join(""));
    if (code) {
      at += code[0].length - 1;
      return quoted(String.fromCodePoint(parseInt(code[1] ?? code[2] ?? code[3], 16)));
    }
    if (/[\p{L}\p{N}<>]/u.test(c)) fail(`\\${c} is not known to it`);
    return quoted(c);
  }

  function bracket() {  // a class of characters, after its [
    let source = "[";
    if (signs[at] === "^") source += signs[at++];
    for (let first = true; ; first = false) {
      const c = signs[at++] ?? fail("a [ has no ]");
      if (c === "]" && !first) return source + "]";
      if (c === "[" || "&-~".includes(c) && signs[at] === c) fail(`write \\${c} in a class`);
      if (c === "\\" && /[DWS]/.test(signs[at] ?? "")) fail(`write [^...] for \\${signs[at]} in a class`);
      source += c === "\\" ? escaped() : c === "-" && !first && signs[at] !== "]" ? "-" : quoted(c);
    }
  }

  function one(source, flags) {  // a single character
    let fits;
    try {
      fits = new RegExp(`^(?:${source})$`, `u${flags}`);
    } catch {
      fail("a class of characters is not understood");
    }
    const own = new Uint8Array(V);
    vocab.forEach((c, id) => { own[id] = fits.test(c); });
    return () => {
      if (positions === MOST_POSITIONS) fail("it is too large");
      characters.push(own);
      follow.push(new Set());
      return {empty: false, first: [positions], last: [positions++]};
    };
  }

  function atom(flags) {
    const c = signs[at++];
    if (c === "\\") return one(escaped().replace(/^(\\p.*)/, "[$1]"), flags);
    if (c === "[") return one(bracket(), flags);
    if (c === ".") return one(flags.includes("s") ? "[^]" : "[^\\n]", flags);
    if (c === "^" || c === "$") fail(`leave out ${c}, a pattern matches the whole gap`);
    if ("*+?{".includes(c)) fail(`nothing is before ${c}`);
    if (c !== "(") return one(quoted(c), flags);
    const opening = /^\?(?::|P?<[A-Za-z_]\w*>|([is]+):)/.exec(signs.slice(at, at + 50).join(""));
    if (signs[at] === "?" && !opening) fail("of (?...) it knows (?:...), (?i:...) and (?s:...)");
    at += opening?.[0].length ?? 0;
    const inner = either([...new Set(flags + (opening?.[1] ?? ""))].join(""));
    return signs[at++] === ")" ? inner : fail("a ( has no )");
  }

  function counted(flags) {
    let node = atom(flags);
    for (;;) {
      const count = /^(?:([*+?])|\{(\d{1,5})(?:(,)(\d{1,5})?)?\})/.exec(signs.slice(at, at + 14).join(""));
      if (!count) return signs[at] === "{" ? fail("its {} is no count") : node;
      at += count[0].length;
      if (signs[at] === "+") fail("leave out the second sign of a count");
      if (signs[at] === "?") at++;
      const least = {"*": 0, "+": 1, "?": 0}[count[1]] ?? Number(count[2]);
      const most = count[1] ? (count[1] === "?" ? 1 : Infinity) : count[4] ? Number(count[4]) : count[3] ? Infinity : least;
      if (most < least) fail("a count ends before it begins");
      node = times(node, least, most);
    }
  }

  const nothing = () => ({empty: true, first: [], last: []});
  const join = (a, b) => {
    for (const p of a.last) for (const q of b.first) follow[p].add(q);
    return {empty: a.empty && b.empty, first: a.empty ? [...a.first, ...b.first] : a.first,
            last: b.empty ? [...a.last, ...b.last] : b.last};
  };
  const times = (node, least, most) => () => {
    let whole = nothing();
    for (let i = 0; i < least; i++) whole = join(whole, node());
    if (most === Infinity) {
      const again = node();
      join(again, again);
      return join(whole, {...again, empty: true});
    }
    for (let i = least; i < most; i++) whole = join(whole, {...node(), empty: true});
    return whole;
  };

  function sequence(flags) {
    const nodes = [];
    while (at < signs.length && signs[at] !== "|" && signs[at] !== ")") nodes.push(counted(flags));
    return () => nodes.reduce((whole, node) => join(whole, node()), nothing());
  }

  function either(flags) {
    const nodes = [sequence(flags)];
    while (signs[at] === "|") {
      at++;
      nodes.push(sequence(flags));
    }
    return () => nodes.map(node => node()).reduce((a, b) =>
      ({empty: a.empty || b.empty, first: [...a.first, ...b.first], last: [...a.last, ...b.last]}));
  }

  const read = either("");
  if (at < signs.length) fail("a ) has no (");
  const whole = read();

  // ---- The states of the automaton are sets of positions.
  const last = new Set(whole.last), states = [], number = new Map();
  const add = set => {
    const key = set.join();
    if (!number.has(key)) {
      if (states.push(set) > MOST_STATES) fail("it is too large");
      number.set(key, states.length - 1);
    }
    return number.get(key);
  };
  number.set("first", 0);
  states.push(null);
  const rows = [];
  for (let q = 0; q < states.length; q++) {
    const to = states[q] ? [...new Set(states[q].flatMap(p => [...follow[p]]))] : [...new Set(whole.first)];
    to.sort((a, b) => a - b);
    rows.push(vocab.map((_, id) => {
      const set = to.filter(p => characters[p][id]);
      return set.length ? add(set) : -1;
    }));
  }
  const accepts = Uint8Array.from(states, set => set ? set.some(p => last.has(p)) : whole.empty);
  // Nothing leads to a state from which no text matches.
  const isAlive = Uint8Array.from(accepts);
  for (let more = true; more;) {
    more = false;
    rows.forEach((row, q) => { if (!isAlive[q] && row.some(to => to >= 0 && isAlive[to])) more = isAlive[q] = true; });
  }
  const next = Int32Array.from(rows.flat(), to => to >= 0 && isAlive[to] ? to : -1);
  const fits = n => {
    let reached = new Set([0]);
    for (let i = 0; i < n; i++) reached = new Set([...reached].flatMap(q => rows[q].filter(to => to >= 0 && isAlive[to])));
    return [...reached].some(q => accepts[q]);
  };
  return {next, accepts, fits};
}

// Return the texts of a list a|b|c, in which \] \| \: \\ stand for themselves; each of them once.
export function toTexts(list) {
  const texts = [""];
  for (const [sign] of list.matchAll(/\\[\]|:\\]|[^]/gu))
    if (sign === "|") texts.push("");
    else texts[texts.length - 1] += [...sign].at(-1);
  return [...new Set(texts)];
}

// Return the pattern of a list of texts.
export const toPattern = list => toTexts(list).map(text => Array.from(text, c => `\\x{${c.codePointAt(0).toString(16)}}`)
  .join("")).join("|");
