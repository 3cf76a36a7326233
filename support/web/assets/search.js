// Finds the likeliest fills of a template, proven, as support/infill does: filling.py says which lengths are searched,
// lengths.py scores them, search.py searches, filters.py says what may stand in a gap. Here each token is a character,
// and each network call sees one text.
//
// A template is a list of segments: {ids}; {length}, a gap; {lengths, isAny, isList}, one of unknown length, with any
// text or one of a list. Gaps that must match have `next` and `accepts`, the automaton of pattern.js.

import {plan, unmask} from "./sampler.js";

const LIMIT = 400, N_REFINED = 8, N_LENGTHS = 3, LONG = 24, DRAWS = 8, REACH = 8;  // as in filling.py
const N_AFTER = 4, WIDTH = 128, MASKED = -1;  // as in lengths.py and search.py

const sum = values => values.reduce((total, v) => total + v, 0);
const product = values => values.reduce((total, v) => total * v, 1);
const range = (begin, end) => Array.from({length: Math.max(0, end - begin)}, (_, i) => begin + i);
const total = segments => sum(segments.map(({ids, length}) => ids?.length ?? length));
const replaced = (list, i, value) => list.map((old, k) => k === i ? value : old);
const ofLength = (gap, length) => ({...gap, lengths: undefined, length});

// ---- The order of partial fills, which breaks ties as Python's tuples do
// path: [[number of an open position, id, loss]], in the order in which they were filled.
function byPath(a, b) {
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    const difference = a[i][0] - b[i][0] || a[i][1] - b[i][1];
    if (difference) return difference;
  }
  return a.length - b.length;
}
const byRank = (a, b) => a.least - b.least || a.frame - b.frame || byPath(a.path, b.path);
const byEstimate = (a, b) => a.estimate - b.estimate || a.frame - b.frame || byPath(a.path, b.path) || a.skip - b.skip;
const nOpen = ({fill}) => fill.filter(id => id === MASKED).length;
const byDepth = (a, b) => nOpen(a) - nOpen(b) || byRank(a, b);
const first = (list, order) => list.length ? list.reduce((a, b) => order(b, a) < 0 ? b : a) : null;

// ---- A text whose gaps have known lengths
class Frame {
  // isOrdered: gaps are filled from left to right, and the id `end` may end the last one before its length is reached
  constructor(segments, mask, isOrdered = false, end = null) {
    Object.assign(this, {x: [], open: [], matches: [], mask, isOrdered, end, start: 0, typical: 0, only: null, nFree: 0});
    for (const {ids, length, next, accepts, isList} of segments) {
      const at = this.x.length, k = this.open.length;
      this.x.push(...ids ?? Array(length).fill(mask));
      if (ids) continue;
      this.begin ??= at;  // the gaps are within begin..stop
      this.stop = at + length;
      this.last = k;  // the first open position of the last gap
      this.open.push(...range(at, at + length));
      if (!isList) this.nFree += length;  // texts of a list are compared, not drawn
      if (next && length) this.matches.push({k, start: at, length, next, accepts});
    }
    this.shown = this.x.length - (segments.at(-1).isEnd ? 1 : 0);
  }

  // The positions whose distributions expand a node: the ends of runs of masks, at first all.
  places({fill, path}) {
    const masks = this.open.filter((_, k) => fill[k] === MASKED);
    if (this.isOrdered && path.length) return masks.slice(0, 1);
    return masks.filter(at => !path.length || !(masks.includes(at - 1) && masks.includes(at + 1)));
  }

  // Whether each id may stand at open position k of a partial fill.
  allowed(fill, k) {
    const tests = this.matches.filter(gap => gap.k <= k && k < gap.k + gap.length)
      .map(gap => matching(gap, fill.slice(gap.k, gap.k + gap.length), k - gap.k, this.mask));
    if (this.only) {
      const fits = this.only.filter(ids => fill.every((id, i) => id === MASKED || id === ids[i]));
      tests.push(range(0, this.mask).map(id => fits.some(ids => ids[k] === id)));
    }
    return range(0, this.mask).map(id => tests.every(test => test[id]));
  }

  // Whether the text ends with this id at open position k.
  ends(k, id) {
    return this.isOrdered && id === this.end && k > this.last;
  }

  // The ids of the text with a fill, without what ends it.
  placed(fill) {
    const k = fill.length - 1, stop = this.ends(k, fill[k]) ? this.open[k] : this.shown;
    const ids = this.x.slice(0, stop);
    fill.forEach((id, i) => { if (this.open[i] < stop) ids[this.open[i]] = id; });
    return ids;
  }
}

// Whether each of V ids, at offset k of a gap, leaves a fill of it that matches. part: the ids of the gap.
function matching({next, accepts}, part, k, V) {
  const to = (q, id) => next[q * V + id], all = range(0, V), choices = id => id === MASKED ? all : [id];
  let reached = new Set([0]), ahead = accepts;  // states that some fill leads to; from which some fill matches
  for (const id of part.slice(0, k))
    reached = new Set([...reached].flatMap(q => choices(id).map(v => to(q, v)).filter(state => state >= 0)));
  for (const id of part.slice(k + 1).reverse()) {
    const later = ahead;
    ahead = accepts.map((_, q) => choices(id).some(v => to(q, v) >= 0 && later[to(q, v)]));
  }
  return all.map(v => [...reached].some(q => to(q, v) >= 0 && ahead[to(q, v)]));
}

// ---- The search for the `top` likeliest fills of frames, which compete
// Nodes are partial fills: {frame: its number, cost, fill, path, skip: how many of its likeliest children are made, least:
// what the cheapest other one costs at least}.
class Search {
  constructor(frames, top) {
    Object.assign(this, {frames, top, queue: [], fills: [], passed: Infinity, sequences: 0});
    frames.forEach(({start, open}, frame) => {
      const root = {frame, cost: start, fill: open.map(() => MASKED), path: [], least: start, skip: 0};
      open.length ? this.push(root) : this.offer(root);
    });
  }

  push(node) {
    const left = nOpen(node) - (node.skip > 0 ? 1 : 0);
    this.queue.push({...node, estimate: node.least + this.frames[node.frame].typical * left});
  }

  take(node) {
    this.queue.splice(this.queue.indexOf(node), 1);
    return node;
  }

  get isFull() {
    return this.fills.length === this.top;
  }

  // The nodes of the queue that may lead into the list.
  get rivals() {
    return this.queue.filter(node => !this.isFull || byRank(node, this.fills.at(-1)) < 0);
  }

  // Make the children of a node, from log p at each of its places.
  expand(node, places, logp) {
    const frame = this.frames[node.frame];
    if (!node.path.length) frame.typical = -sum(logp.map(p => Math.max(...p))) / logp.length;
    const here = frame.isOrdered ? 0 : surest(places, logp), k = frame.open.indexOf(places[here]), p = logp[here];
    const allowed = frame.allowed(node.fill, k), stop = node.skip + WIDTH;
    const ids = range(0, p.length).filter(id => allowed[id]).sort((a, b) => p[b] - p[a]);
    for (const id of ids.slice(node.skip, stop)) {
      const cost = node.cost - p[id], path = [...node.path, [k, id, -p[id]]];
      let fill = replaced(node.fill, k, id);
      if (frame.ends(k, id)) fill = fill.slice(0, k + 1);  // what follows is not filled
      const child = {frame: node.frame, cost, fill, path, least: cost, skip: 0};
      if (this.isFull && byRank(child, this.fills.at(-1)) > 0) {  // so are all others
        this.passed = Math.min(this.passed, cost);
        return;
      }
      nOpen(child) ? this.push(child) : this.offer(child);
    }
    if (stop < ids.length) this.push({...node, least: node.cost - p[ids[stop]], skip: stop});
  }

  // Take a complete fill, if it is among the best. Fills of different lengths may make the same text.
  offer(node) {
    const ids = this.frames[node.frame].placed(node.fill), text = ids.join();
    const same = this.fills.find(one => one.text === text);
    if (same && byRank(same, node) < 0) return;
    this.fills = [...this.fills.filter(one => one !== same), {...node, ids, text}].sort(byRank);
    if (this.fills.length > this.top) this.passed = Math.min(this.passed, this.fills.pop().least);
  }

  // An upper bound of log p of every fill that is not listed.
  get bound() {
    return -this.queue.reduce((least, node) => Math.min(least, node.least), this.passed);
  }
}

// Which of the places has the lowest entropy, of those that are not between two others.
function surest(places, logp) {
  const entropy = logp.map(p => -sum(p.map(v => Math.exp(v) * v)));
  const isBetween = at => places.includes(at - 1) && places.includes(at + 1);
  const atEdge = range(0, places.length).filter(i => !isBetween(places[i]));
  return first(atEdge, (a, b) => entropy[a] - entropy[b]);
}

// Search until the list is proven, or the network has seen `limit` texts. Even then there is a fill: the one that is
// nearest to its end is completed. ask(ids, places): log p at some places of a text.
async function run(ask, search, limit) {
  const expand = async node => {
    const {x, open} = search.frames[node.frame], places = search.frames[node.frame].places(node), ids = [...x];
    node.fill.forEach((id, k) => { if (id !== MASKED) ids[open[k]] = id; });
    search.sequences++;
    search.expand(node, places, await ask(ids, places));
  };
  while (search.sequences < limit && search.rivals.length) await expand(search.take(first(search.rivals, byEstimate)));
  while (!search.fills.length && search.queue.length) await expand(search.take(first(search.queue, byDepth)));
  return search;
}

// ---- Lengths
// The segments of the likeliest shapes, whose gaps have known lengths.
async function likelyShapes(ask, segments, {mask, context, end}) {
  const last = segments.length - 1, isEndless = Boolean(segments[last].isAny), known = [...segments];
  const options = new Map(segments.map(({lengths}, i) => [i, lengths]).filter(([, lengths]) => lengths));
  if (isEndless) {
    options.delete(last);
    known[last] = {length: 1};
  } else if (options.has(last) && end !== null) {
    known.push({ids: [end], isEnd: true});
  }
  const usual = lengths => first(lengths, (a, b) => Math.abs(a - 4) - Math.abs(b - 4));
  for (const [i, lengths] of options) known[i] = ofLength(known[i], usual(lengths));
  if (total(known) > context) for (const [i, lengths] of options) known[i] = ofLength(known[i], lengths[0]);
  const all = [...options.values()], isList = [...options.keys()].map(i => segments[i].isList);
  const room = context - total(known.filter((_, i) => !options.has(i)));
  const nOptions = product(all.map(lengths => lengths.length));
  // Of each combination of the lengths of lists, whose texts are all compared, so many.
  const nKept = N_LENGTHS + all.length - 1, nListed = product(all.map((lengths, i) => isList[i] ? lengths.length : 1));
  let combined = [{chosen: [], score: 0}];
  for (const [i, lengths] of options) {
    const scores = nOptions > nListed * nKept ? await scoresOf(ask, known, i, lengths, all.length > 1, mask, context)
      : new Map(lengths.map(m => [m, 0]));
    combined = combined.flatMap(({chosen, score}) => [...scores].filter(([m]) => sum(chosen) + m <= room)
      .map(([m, own]) => ({chosen: [...chosen, m], score: score + own})));
  }
  if (!combined.length) throw `No fill leaves room for the whole text in ${context} characters; shorten it.`;
  const taken = new Map();
  const best = combined.sort((a, b) => b.score - a.score).map(({chosen}) => chosen).filter(chosen => {
    const key = String(chosen.filter((_, i) => isList[i]));
    taken.set(key, (taken.get(key) ?? 0) + 1);
    return taken.get(key) <= nKept;
  });
  return best.sort((a, b) => byPath(a.map(m => [m, 0]), b.map(m => [m, 0]))).map(chosen => {
    const shape = [...known];
    [...options.keys()].forEach((i, k) => { shape[i] = ofLength(segments[i], chosen[k]); });
    if (isEndless) shape[last] = {length: Math.min(segments[last].lengths.at(-1), context - total(shape) + 1)};
    return shape;
  });
}

// A Map from each length of gap `number` to its score, the others of a usual length. isRefined: of the likely lengths,
// by a good fill of each.
async function scoresOf(ask, known, number, lengths, isRefined, mask, context) {
  const scores = new Map(), next = new Map(), refined = new Map();
  const shapeOf = m => replaced(known, number, ofLength(known[number], m));
  for (const m of lengths) {
    if (total(shapeOf(m)) > context) continue;
    const [token, inside] = await scoreLength(ask, shapeOf(m), number, mask);
    next.set(m, token);
    scores.set(m, token + inside);
  }
  if (!isRefined) return scores;
  const likely = [...scores.keys()].sort((a, b) => scores.get(b) - scores.get(a)).slice(0, N_REFINED);
  for (const m of likely) {
    const others = shapeOf(m).map((one, i) => one.ids || i === number ? one : {ids: Array(one.length).fill(mask)});
    const search = await run(ask, new Search([new Frame(others, mask)], 1), Math.max(...likely) + 4);
    refined.set(m, search.fills.length ? next.get(m) - search.fills[0].cost : scores.get(m));
  }
  return refined;
}

// [log p of the token after gap `number`, the largest log p inside], seen with the gap and N_AFTER tokens masked.
async function scoreLength(ask, shape, number, mask) {
  const ids = shape.flatMap(({ids, length}) => ids ?? Array(length).fill(mask));
  const begin = total(shape.slice(0, number)), end = begin + shape[number].length;
  const after = range(end, Math.min(end + N_AFTER, ids.length)).filter(at => ids[at] !== mask);
  const isBeside = after[0] === end;
  const seen = ids.map((id, at) => after.includes(at) ? mask : id);
  const logp = await ask(seen, range(begin, end + (isBeside ? 1 : 0)));
  return [isBeside ? logp.pop()[ids[end]] : 0, largest(shape[number], logp, mask)];
}

// The largest sum over the positions of a gap, of log p at each of them, of fills that it may have.
function largest({next, accepts}, logp, V) {
  if (!next) return sum(logp.map(p => Math.max(...p)));
  let best = Float64Array.from(accepts, a => a ? 0 : -Infinity);  // of the best way from each state on
  for (const p of [...logp].reverse()) {
    const later = best, way = q => (v, id) => next[q * V + id] < 0 ? -Infinity : v + later[next[q * V + id]];
    best = best.map((_, q) => Math.max(...p.map(way(q))));
  }
  return best[0];
}

// log p(after | before) of a frame, with masks in its gaps: of the text between them, and of REACH tokens after them.
async function afterGivenBefore(ask, {x, open, begin, stop}) {
  let logp = 0;
  for (const at of range(begin, Math.min(x.length, stop + REACH)).filter(at => !open.includes(at)))
    logp += (await ask(x.slice(0, at), [at]))[0][x[at]];
  return logp;
}

// ---- The result
// log p of each id of a text, from its logits.
function logpOf(logits) {
  const top = Math.max(...logits), all = Math.log(sum(logits.map(v => Math.exp(v - top))));
  return logits.map(v => v - top - all);
}

// The ids at `open` of a text x: in each call the surest token, the likeliest of all positions.
async function surestFill(predict, x, open, mask) {
  const ids = [...x];
  for (const _ of open) {
    const [logits] = await predict([ids]);
    const best = {logp: -Infinity};
    for (const at of open.filter(at => ids[at] === mask)) {
      const logp = logpOf(Float64Array.from(logits.subarray(at * mask, (at + 1) * mask)));
      const id = logp.indexOf(Math.max(...logp));
      if (logp[id] > best.logp) Object.assign(best, {logp: logp[id], at, id});
    }
    ids[best.at] = best.id;
  }
  return open.map(at => ids[at]);
}

// Find the n likeliest fills of a template: {fills, proven, bound, comparesLengths}, the best first. Of each fill, ids:
// the text; given: the same with masks in the gaps; matches: the gaps that must match, as `plan` takes them; logp: by
// which fills compete; p: of all fills of its length, given the text on both sides; frames: [position, id, p, []] of
// each of its ids.
//
// model: {mask, context: the most characters, end: the id of a line break or null, temperature: of its calibration}
// how: {seed, steps, temperature} of a sampler that fills what a search cannot; null: nothing is drawn
export async function search(predict, segments, n, {mask, context, end, temperature}, how = null) {
  const ask = async (ids, places) => {
    const [logits] = await predict([ids]);
    const at = place => Float64Array.from(logits.subarray(place * mask, (place + 1) * mask), v => v / temperature);
    return places.map(place => logpOf(at(place)));
  };
  const isEndless = Boolean(segments.at(-1).isAny), shapes = await likelyShapes(ask, segments, {mask, context, end});
  const frames = shapes.map(shape => new Frame(shape, mask, isEndless, end));
  const toDraw = how && !isEndless ? frames.filter(({nFree}) => nFree > LONG) : [];
  for (const frame of toDraw) {
    const {x, open, matches} = frame, draws = matches.length ? DRAWS : DRAWS - 1;
    const rows = range(0, draws).map(sample => plan(x, sample, mask, {...how, matches}));
    for await (const _ of unmask(predict, rows, mask, how));
    frame.only = rows.map(row => open.map(at => row.ids[at]));
    if (!matches.length) frame.only.push(await surestFill(predict, x, open, mask));
  }
  if (frames.length > 1) for (const frame of frames) frame.start = -await afterGivenBefore(ask, frame);
  const found = await run(ask, new Search(frames, n), LIMIT);
  const fills = found.fills.map(({frame: number, cost, ids, path}) => {
    const {x, open, matches, start} = frames[number];
    const drawn = path.map(([k, id, loss]) => [open[k], id, Math.exp(-loss), []]).filter(([at]) => at < ids.length);
    return {ids, given: x.slice(0, ids.length), matches, logp: -cost, p: Math.exp(start - cost), number,
            frames: [drawn.sort((a, b) => a[0] - b[0])]};
  });
  // Of fills of which some were drawn any other may have all the rest.
  const rest = number => 1 - sum(fills.filter(fill => fill.number === number).map(({p}) => p));
  const bounds = frames.map(({start}, number) => Math.log(Math.max(rest(number), 1e-300)) - start);
  return {fills, comparesLengths: frames.length > 1, proven: !toDraw.length && !found.rivals.length,
          bound: toDraw.length ? Math.max(...bounds) : found.bound};
}
