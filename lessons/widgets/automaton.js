// Lesson 13: the automaton of a pattern, and the way of a text through it.
import {define, h} from "./common.js";
import {toAutomaton} from "../../support/web/assets/pattern.js";

// The characters of the model: line break, space, signs, letters.
const VOCAB = [..."\n !$&',-.3:;?", ..."ABCDEFGHIJKLMNOPQRSTUVWXYZ", ..."abcdefghijklmnopqrstuvwxyz"];

// Merge states of the same future: {next: [Map of character -> state], accepts}. Where nothing can follow, only those of the
// same distance from the first, as in the lesson. They are numbered as they are reached, those first that accept.
export function minimize({next, accepts}, vocab) {
  const V = vocab.length, n = accepts.length, states = [...Array(n).keys()];
  const depth = new Map([[0, 0]]);
  for (const [q, d] of depth) for (const to of next.subarray(q * V, (q + 1) * V)) if (to >= 0 && !depth.has(to)) depth.set(to, d + 1);
  const isLast = q => next.subarray(q * V, (q + 1) * V).every(to => to < 0);
  let kind = states.map(q => accepts[q] + (isLast(q) ? 2 * (depth.get(q) ?? 0) : 0));
  for (let count = 0; count !== new Set(kind).size;) {
    count = new Set(kind).size;
    const of = q => [kind[q], ...Array.from(next.subarray(q * V, (q + 1) * V), to => to < 0 ? -1 : kind[to])].join();
    const numbers = new Map(), keys = states.map(of);
    kind = keys.map(key => numbers.get(key) ?? (numbers.set(key, numbers.size), numbers.size - 1));
  }
  const order = [0], small = {next: [], accepts: []}, number = new Map([[kind[0], 0]]);
  for (let k = 0; k < order.length; k++) {
    const q = order[k], ways = new Map();
    small.accepts.push(Boolean(accepts[q]));
    const characters = vocab.map((c, v) => [c, next[q * V + v]]).filter(([, to]) => to >= 0);
    characters.sort((a, b) => accepts[b[1]] - accepts[a[1]]).forEach(([c, to]) => {
      if (!number.has(kind[to])) number.set(kind[to], order.push(to) - 1);
      ways.set(c, number.get(kind[to]));
    });
    small.next.push(ways);
  }
  return small;
}

// Characters in short: "a–z", "not x" where all but a few lead the same way.
export function inShort(characters, vocab) {
  const at = characters.map(c => vocab.indexOf(c)).sort((a, b) => a - b);
  if (at.length === vocab.length) return "any";
  if (at.length > vocab.length - 4) return "not " + vocab.filter(c => !characters.includes(c)).map(shown).join(" ");
  const runs = [];
  for (const v of at) {
    const run = runs.at(-1), c = vocab[v];
    if (run && run.last === v - 1 && /\w/.test(c) && c !== "A" && c !== "a") run.last = v;
    else runs.push({first: v, last: v});
  }
  return runs.map(({first, last}) => last - first < 2
    ? vocab.slice(first, last + 1).map(shown).join(" ") : `${vocab[first]}–${vocab[last]}`).join(" ");
}
const shown = c => ({" ": "␣", "\n": "↵"})[c] ?? c;

define("automaton", {
  title: "An automaton",
  about: "Type a pattern, then a text: the states that it passes light up. A text matches if it ends in a state with two " +
    "rings.",
  fields: {pattern: "so|not|now|sea", text: "no"},
  build(widget) {
    const {values} = widget;
    widget.text("pattern", "pattern", {maxLength: 60});
    const typed = widget.text("text", "text", {maxLength: 40});
    return () => {
      const {next, accepts} = minimize(toAutomaton(values.pattern, VOCAB), VOCAB);
      if (next.length > 24) throw `This pattern has ${next.length} states, too many to draw; shorten it.`;
      const path = [0];
      let wrong = -1;  // where the text leaves the automaton
      for (const [i, c] of Array.from(values.text).entries()) {
        const to = next[path.at(-1)].get(c);
        if (to === undefined) { wrong = i; break; }
        path.push(to);
      }
      const press = c => { typed.value = values.text + c; typed.dispatchEvent(new Event("input")); };
      const here = path.at(-1), ways = wrong < 0 ? waysOf(next[here]) : [];
      widget.view.replaceChildren(drawing({next, accepts}, path, wrong, widget.view.clientWidth));
      if (ways.length) widget.view.append(h("p", {className: "ways"}, "next: ", ways.flatMap(([, all]) => all).slice(0, 12)
        .map(c => h("button", {type: "button", className: "quiet", onclick: () => press(c)}, shown(c))), ways.flatMap(([, all]) => all).length > 12 ? " …" : ""));
      Object.assign(widget.view.dataset, {path: JSON.stringify(path), states: next.length, wrong, matches: wrong < 0 && accepts[here]});
      const text = `“${values.text}”`;
      if (wrong >= 0) widget.say(`${text}: no text that begins with “${values.text.slice(0, wrong + 1)}” matches. This is the dead end.`);
      else if (accepts[here]) widget.say(`${text} matches${next[here].size ? ", and may go on" : ": nothing can follow"}.`);
      else widget.say(`${text} is in state ${here}: it does not match yet.`);
    };
  },
});

// [[state, [characters that lead there]]]
function waysOf(ways) {
  const found = new Map();
  for (const [c, to] of ways) found.set(to, [...found.get(to) ?? [], c]);
  return [...found];
}

// States in columns by their distance from the first, or in rows if the columns need more than `room` pixels. Ways forward
// are lines, all others curves below (or beside).
function drawing({next, accepts}, path, wrong, room) {
  const depth = new Map([[0, 0]]), todo = [0];
  for (const q of todo) for (const [to] of waysOf(next[q])) if (!depth.has(to)) { depth.set(to, depth.get(q) + 1); todo.push(to); }
  const columns = [];
  for (const [q, d] of depth) (columns[d] ??= []).push(q);
  const tall = Math.max(...columns.map(column => column.length)), R = 17, W = 112, H = 74;
  const hasLoop = next.some((ways, q) => waysOf(ways).some(([to]) => to === q));
  const long = columns.length * W - W + 2 * R + 60, isUpright = room < .75 * long;
  const top = hasLoop && !isUpright ? 42 : 12, height = isUpright ? columns.length * H + 12 : top + tall * H + 12;
  const width = isUpright ? Math.max(room, tall * W + 2 * W) : long;
  const place = q => {
    const column = columns[depth.get(q)], k = column.indexOf(q), side = (tall - column.length) / 2 + k + 1 / 2;
    return isUpright ? [width / 2 + (side - tall / 2) * W, top + depth.get(q) * H + R]
      : [30 + R + depth.get(q) * W, top + side * H];
  };
  const isUsed = (q, to) => path.some((at, i) => at === q && path[i + 1] === to);
  const edges = next.flatMap((ways, q) => waysOf(ways).map(([to, characters]) => {
    const [x1, y1] = place(q), [x2, y2] = place(to), label = inShort(characters, VOCAB), lit = isUsed(q, to) ? "lit" : "";
    let d, x = (x1 + x2) / 2, y = (y1 + y2) / 2 - 6;
    if (isUpright && q === to) {
      [x, y] = [x1 + R + 34, y1 + 5];
      d = `M${x1 + R - 2} ${y1 - 8} C${x1 + R + 26} ${y1 - 24} ${x1 + R + 26} ${y1 + 24} ${x1 + R - 1} ${y1 + 8}`;
    } else if (q === to) {
      [d, y] = [`M${x1 - 8} ${y1 - R + 2} C${x1 - 26} ${y1 - R - 30} ${x1 + 26} ${y1 - R - 30} ${x1 + 8} ${y1 - R + 2}`, y1 - R - 26];
    } else if (depth.get(to) === depth.get(q) + 1) {
      const length = Math.hypot(x2 - x1, y2 - y1), ux = (x2 - x1) / length, uy = (y2 - y1) / length;
      d = `M${x1 + ux * R} ${y1 + uy * R} L${x2 - ux * (R + 4)} ${y2 - uy * (R + 4)}`;
    } else if (isUpright && y1 === y2) {
      const side = Math.sign(x2 - x1);
      [d, y] = [`M${x1 + side * R} ${y1} Q${x} ${y1 + 36} ${x2 - side * (R + 4)} ${y2}`, y1 + 24];
    } else if (isUpright) {
      const bend = Math.max(x1, x2) + W * .8;
      [d, x, y] = [`M${x1 + R} ${y1} Q${bend} ${y} ${x2 + R + 4} ${y2}`, (x1 + x2) / 4 + bend / 2 + 12, y + 10];
    } else {
      const bend = Math.max(y1, y2) + H * .62;
      [d, y] = [`M${x1} ${y1 + R} Q${x} ${bend + 18} ${x2} ${y2 + R + 4}`, (y1 + y2) / 4 + R / 2 + (bend + 18) / 2 + 12];
    }
    return h("g", {class: `way ${lit}`}, h("path", {d, "marker-end": "url(#arrow)"}), h("text", {x, y}, label));
  }));
  const nodes = next.map((_, q) => {
    const [x, y] = place(q), lit = path.includes(q) ? "lit" : "", end = q === path.at(-1) ? (wrong >= 0 ? "stuck" : "end") : "";
    return h("g", {class: `state ${lit} ${end}`}, h("circle", {cx: x, cy: y, r: R}),
      accepts[q] ? h("circle", {cx: x, cy: y, r: R - 4, class: "ring"}) : null, h("text", {x, y: y + 5}, String(q)));
  });
  const svg = h("svg", {viewBox: `0 0 ${width} ${height}`, class: "graph", role: "img", "aria-label": `an automaton of ${next.length} states`,
    width, "--width": width}, edges, nodes);
  const defs = document.createElementNS("http://www.w3.org/2000/svg", "defs");
  defs.innerHTML = '<marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="10" orient="auto">' +
    '<path d="M0 0 L8 4 L0 8 z"/></marker>';
  svg.prepend(defs);
  return svg;
}
