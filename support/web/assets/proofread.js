// Finds characters that do not belong in a text, and what to write there, as support/proofread/proofreader.py does: doubtful
// characters get proposals, the pseudo-likelihood of their neighbours prunes these, and the exact likelihood and the prior
// of mistakes decide.

import {logSoftmax} from "./sampler.js";

const WORD = /[\p{L}\p{N}]+/gu, LONGEST = 64;  // characters beside an edit in which its words are looked for
const byStart = (a, b) => a.start - b.start;
const span = (start, stop) => Array.from({length: Math.max(0, stop - start)}, (_, i) => start + i);

// The ids with `run` of them in a row masked, from `phase` on every so many.
const thinned = (ids, every, phase, mask, run = 1) =>
  ids.map((id, i) => ((i - phase) % every + every) % every < run ? mask : id);

// Edits of a text that are far apart, made at once. before, after: ids without and with them. edits: those that fit into
// the context. starts: in `after`. room: characters after each edit up to the end of the context or the text.
function packed(ids, edits, context) {
  const kept = [], starts = [];
  let after = [], end = 0;
  for (const edit of edits) {
    const start = after.length + edit.start - end;
    if (Math.max(start + edit.ids.length, edit.stop) > context) break;
    after.push(...ids.slice(end, edit.start), ...edit.ids);
    kept.push(edit);
    starts.push(start);
    end = edit.stop;
  }
  const shift = after.length - end, longest = Math.min(ids.length, context, context - shift);
  after = [...after, ...ids.slice(end)].slice(0, context);
  return {before: ids, after, edits: kept, starts, room: kept.map(edit => longest - edit.stop)};
}

// [{text, sign, places}] of a pack after its edits and before them; places: [{edit, start, stop, room}].
const sidesOf = ({before, after, edits, starts, room}) => [
  {text: after, sign: 1, places: edits.map((edit, k) =>
    ({edit, start: starts[k], stop: starts[k] + edit.ids.length, room: room[k]}))},
  {text: before, sign: -1, places: edits.map((edit, k) => ({edit, start: edit.start, stop: edit.stop, room: room[k]}))},
];

// The prior of mistakes, as in support/proofread/mistakes.py. cost: nats by which any mistake is less likely than none.
export function priorOf(vocab, {cost, BESIDE, beside}) {
  const V = vocab.length, ids = new Map(vocab.map((own, id) => [own, id]));
  const near = vocab.map(own => [...beside[own] ?? ""].filter(other => ids.has(other)).map(other => ids.get(other)));
  const slips = near.map((others, id) => [id, ...others]);
  // p that a character is written for a reason of the keyboard, which gives some, or for none, which gives any.
  const p = (some, id) => some.length ? (1 - BESIDE) / V + (some.includes(id) ? BESIDE / some.length : 0) : 1 / V;
  const wrong = (id, right) => Math.log(p(near[right], id));  // log p of what is written where another is meant
  return {
    cost,
    wrong,
    substitution: (id, right) => cost - wrong(id, right),
    deletion(id, around) {  // of a character too many; around: those before and after it
      const each = around.filter(i => i < V).map(i => p(slips[i], id));
      return cost - Math.log(each.length ? each.reduce((a, b) => a + b) / each.length : 1 / V);
    },
  };
}

// How often each word occurs in a text, in upper or lower case.
function wordsOf(text) {
  const counts = new Map();
  for (const [word] of text.toLowerCase().matchAll(WORD)) counts.set(word, (counts.get(word) ?? 0) + 1);
  return counts;
}

// Whether an edit, `fresh` for `old` between two texts, turns words that a text has elsewhere into some that it has not.
function losesKnownWords(counts, before, old, fresh, after) {
  const left = before.match(/[\p{L}\p{N}]*$/u)[0], right = after.match(/^[\p{L}\p{N}]*/u)[0];
  let [were, are] = [old, fresh].map(middle => (left + middle + right).toLowerCase().match(WORD) ?? []);
  while (were.length && are.length && were[0] === are[0]) [were, are] = [were.slice(1), are.slice(1)];
  while (were.length && are.length && were.at(-1) === are.at(-1)) [were, are] = [were.slice(0, -1), are.slice(0, -1)];
  const times = word => were.filter(other => other === word).length;
  const areElsewhere = were.length && were.every(word => (counts.get(word) ?? 0) > times(word));
  return areElsewhere && !are.every(word => counts.has(word));
}

// The parts of a text: `original` and what is `done`, both tokens. made: the edits between, as `correct` returns them.
function compare(original, done, made) {
  const parts = [];
  let kept = "", old = "", fresh = "", at = 0, low = original[0].number - 1;
  const keep = () => {
    if (kept) parts.push({before: kept, after: kept, change: null});
    kept = "";
  };
  for (const token of [...done, null]) {
    if (token?.isChanged) {
      fresh += token.own;
      continue;
    }
    const number = token?.number ?? original.at(-1).number + 1;
    for (; at < original.length && original[at].number < number; at++) old += original[at].own;
    if (old !== fresh) {
      keep();
      const edits = made.filter(({key}) => low < key && key < number).map(({edit}) => edit);
      const {kind, pBefore, pAfter} = edits.length === 1 ? edits[0] : {kind: "substitution", pBefore: null, pAfter: null};
      const gain = edits.reduce((sum, edit) => sum + edit.gain, 0);
      parts.push({before: old, after: fresh, change: {kind, gain, pBefore, pAfter}});
    } else kept += old;
    old = fresh = "";
    if (!token) break;
    kept += token.own;
    at++;
    low = number;
  }
  keep();
  return parts;
}

// Proofread a text, window by window. vocab: the model's characters, whose number is the id of [MASK]. Yields a list of
// parts for each window, [{before, after, change}]; change: null for what is kept, else {kind, gain, pBefore, pAfter},
// the gain in nats. Characters that the model never saw are shown to it as [MASK], and stay. settings: the constants of
// proofreader.py and the prior, from live_page.py.
export async function* proofread(predict, text, vocab, context, settings) {
  const {EVERY, RUN_EVERY, RUN, REACH, NEAR, SPARSE, APART, RIVALS, ROUNDS, DOUBT, RUN_DOUBT, PROMISE} = settings;
  const {TWICE} = settings, counts = wordsOf(text);
  const prior = priorOf(vocab, settings);
  const mask = vocab.length, ids = new Map(vocab.map((own, id) => [own, id]));
  const tokens = Array.from(text, (own, number) => ({own, number, id: ids.get(own) ?? mask}));
  const margin = context >> 3, stride = Math.max(1, context - 2 * margin);

  // Answer questions about masked places: [{row, at, id, ...}], row: ids; id: the character that is asked for, or -1.
  // Adds `logp` of it, and the best other one, `best`, with `bestLogp`: what was meant, most probably, if it was written.
  async function ask(questions) {
    for (const row of new Set(questions.map(question => question.row))) {
      const [logits] = await predict([row]);
      for (const question of questions.filter(each => each.row === row)) {
        const {at, id} = question, logp = logSoftmax(logits.subarray(at * mask, (at + 1) * mask));
        const score = id < 0 ? logp : logp.map((p, v) => p + Math.fround(prior.wrong(id, v)));
        const best = score.reduce((a, p, v) => v !== id && (a < 0 || p > score[a]) ? v : a, -1);
        Object.assign(question, {logp: logp[id], best, bestLogp: logp[best]});
      }
    }
    return questions;
  }

  // A Map from edits to the sums of log p of their questions, less those of the text before.
  async function sums(questions) {
    const total = new Map();
    for (const {edit, sign, logp} of await ask(questions)) total.set(edit, (total.get(edit) ?? 0) + sign * logp);
    return total;
  }

  // Packs of edits that share calls, each far enough from the others in its pack.
  function packsOf(ids, edits) {
    const packs = [];
    for (const edit of [...edits].sort(byStart)) {
      const free = packs.find(pack => edit.start >= pack.at(-1).stop + APART);
      free ? free.push(edit) : packs.push([edit]);
    }
    return packs.map(pack => packed(ids, pack, context)).filter(pack => pack.edits.length);
  }

  // 1. Doubt: characters that are unlikely masked alone, one of EVERY, or with the next ones, RUN of RUN_EVERY.
  async function doubts(ids, begin, end) {
    const places = span(begin, end).filter(i => ids[i] !== mask);
    const once = (every, run) => {
      const rows = span(0, every).map(phase => thinned(ids, every, phase, mask, run));
      return ask(places.map(i => ({row: rows[i % every], at: i, id: ids[i]})));
    };
    const alone = await once(EVERY, 1), inRun = await once(RUN_EVERY, RUN);
    return alone.filter(({logp}, k) => logp < -DOUBT || inRun[k].logp < -RUN_DOUBT);
  }

  // 2. Propose, at doubtful characters: another one, one more, one less, or two swapped.
  async function propose(ids, begin, end, near) {
    const edits = [], seams = new Set(), swaps = new Set(), unknown = {pBefore: null, pAfter: null};
    for (const {at: i, logp, best, bestLogp} of await doubts(ids, begin, end)) {
      if (near && !near.has(i)) continue;
      const p = Math.exp(logp), other = {single: bestLogp - logp, pBefore: p, pAfter: Math.exp(bestLogp)};
      const where = {start: i, stop: i + 1}, around = [...ids.slice(Math.max(0, i - 1), i), ...ids.slice(i + 1, i + 2)];
      edits.push({...where, ids: [best], kind: "substitution", cost: prior.substitution(ids[i], best), ...other});
      edits.push({...where, ids: [], kind: "deletion", cost: prior.deletion(ids[i], around), pBefore: p, pAfter: null});
      for (const j of [i - 1, i]) {
        const [first, second] = [ids[j], ids[j + 1]], isHere = begin <= j && j + 2 <= ids.length;
        if (!isHere || first === second || first === mask || second === mask || swaps.has(j)) continue;
        swaps.add(j);
        edits.push({start: j, stop: j + 2, ids: [second, first], kind: "swap", cost: prior.cost, ...unknown});
      }
      seams.add(i).add(i + 1);
    }
    const missing = [...seams].map(j =>
      ({start: j, stop: j, ids: [mask], kind: "insertion", cost: prior.cost, ...unknown}));
    return [...edits, ...await filled(ids, missing)];
  }

  // Insertions of [MASK], with the likeliest character in its place.
  async function filled(ids, edits) {
    const questions = packsOf(ids, edits).flatMap(({after, edits, starts}) =>
      edits.map((edit, k) => ({edit, row: after, at: starts[k], id: -1})));
    return (await ask(questions)).map(({edit, best, bestLogp}) => ({...edit, ids: [best], pAfter: Math.exp(bestLogp)}));
  }

  // 3. Prune: the edits that make their neighbourhood likelier, at most RIVALS near each other.
  async function prune(ids, edits) {
    const thinnings = text => span(0, SPARSE).map(phase => thinned(text, SPARSE, phase, mask));
    const before = thinnings(ids), questions = [];
    for (const pack of packsOf(ids, edits)) {
      for (const {text, sign, places} of sidesOf(pack)) {
        const rows = sign > 0 ? thinnings(text) : before;
        for (const {edit, start, stop, room} of places)
          for (const i of span(Math.max(0, start - NEAR), stop + Math.min(NEAR, room)))
            if (text[i] !== mask) questions.push({edit, sign, row: rows[i % SPARSE], at: i, id: text[i]});
      }
    }
    const promise = await sums(questions), kept = [];
    for (const [edit, value] of promise) promise.set(edit, value - edit.cost);
    const order = (a, b) => promise.get(b) - promise.get(a) || byStart(a, b) || (a.kind < b.kind ? -1 : a.kind > b.kind);
    for (const edit of [...promise.keys()].sort(order)) {
      const rivals = kept.filter(other => Math.abs(edit.start - other.start) <= NEAR).length;
      if (promise.get(edit) > PROMISE && rivals < RIVALS) kept.push(edit);
    }
    return kept.sort(byStart);
  }

  // 4. Decide: the edits with their gains. The chain rule reads from left to right.
  async function decide(ids, edits) {
    const questions = [];
    for (const pack of packsOf(ids, edits)) {
      for (const {text, sign, places} of sidesOf(pack)) {
        const regions = places.map(({edit, start, stop, room}) => ({edit, at: span(start, stop + Math.min(REACH, room))}));
        for (const k of span(0, Math.max(...regions.map(({at}) => at.length)))) {
          const row = [...text];
          for (const {edit, at} of regions) {
            for (const i of at.slice(k)) row[i] = mask;
            if (k < at.length && text[at[k]] !== mask) questions.push({edit, sign, row, at: at[k], id: text[at[k]]});
          }
        }
      }
    }
    const gains = await sums(questions);
    return edits.filter(edit => gains.has(edit)).map(edit => {
      const gain = gains.get(edit);
      return {...edit, gain: edit.kind === "substitution" ? (gain + edit.single) / 2 : gain};
    });
  }

  // The edits that are kept, the best first, without those near a better one. An edit is kept if it and the edits near
  // it, each another account of the same mistake, are together likelier than no mistake.
  function bestApart(window, edits) {
    const textOf = (start, stop) => window.slice(Math.max(0, start), stop).map(token => token.own).join("");
    const knownLost = new Set(edits.filter(({start, stop, ids, kind}) => {
      const old = textOf(start, stop);
      const fresh = kind === "swap" ? textOf(start + 1, stop) + textOf(start, start + 1) : ids.map(id => vocab[id]).join("");
      return losesKnownWords(counts, textOf(start - LONGEST, start), old, fresh, textOf(stop, stop + LONGEST));
    }));
    const excess = edit => edit.gain - edit.cost - (knownLost.has(edit) ? TWICE : 0), kept = [];  // log-odds
    for (const edit of [...edits].sort((a, b) => excess(b) - excess(a) || byStart(a, b))) {
      const isFar = other => edit.start >= other.stop + REACH || other.start >= edit.stop + REACH;
      const accounts = edits.filter(other => Math.abs(other.start - edit.start) <= NEAR);
      const odds = accounts.reduce((sum, other) => sum + Math.exp(excess(other)), 0);
      if (odds > 1 && kept.every(isFar)) kept.push(edit);
    }
    return kept.sort(byStart);
  }

  // Correct the characters begin..end of a window, in rounds: {window, made}. made: [{key, edit}], where a key is half
  // more than the number of the character before an edit.
  async function correct(window, begin, end) {
    const made = [];
    let near = null;  // in later rounds: only what is near a change
    for (let round = 0; round < ROUNDS; round++) {
      const ids = window.slice(0, context).map(token => token.id);  // insertions may exceed it
      const proposed = await propose(ids, begin, Math.min(end, ids.length), near);
      const edits = bestApart(window, await decide(ids, await prune(ids, proposed)));
      if (!edits.length) break;
      let shift = 0;
      near = new Set();
      window = [...window];
      for (const edit of edits) {
        const start = edit.start + shift, old = window.slice(start, edit.stop + shift);
        const fresh = edit.ids.map((id, k) => ({id, isChanged: true, number: old[k]?.number ?? null,
                                                own: edit.kind === "swap" ? old[1 - k].own : vocab[id]}));
        const known = window.slice(0, start).map(token => token.number).filter(number => number !== null);
        made.push({key: (known.length ? Math.max(...known) : -1) + .5, edit});
        window.splice(start, old.length, ...fresh);
        for (const i of span(start - REACH, start + fresh.length + REACH)) near.add(i);
        shift += fresh.length - old.length;
      }
      end += shift;
    }
    return {window, made};
  }

  let before = [];  // corrected tokens
  for (let at = 0; at < tokens.length;) {
    const ahead = tokens.slice(at, at + stride + margin), own = ahead.slice(0, stride), begin = before.length;
    const {window, made} = await correct([...before, ...ahead], begin, begin + own.length);
    const limit = own.at(-1).number, all = window.slice(begin);
    const isAhead = ({number, isChanged}) => number !== null && number > limit && !isChanged;
    const stop = all.findIndex(isAhead), done = stop < 0 ? all : all.slice(0, stop);
    const last = Math.max(limit, ...done.map(token => token.number ?? -1));
    yield compare(tokens.slice(at, last + 1), done, made);
    before = margin ? [...before, ...done].slice(-margin) : [];
    at = last + 1;
  }
}
