// Finds characters that do not belong in a text, and what to write there, as support/proofread/proofreader.py does: doubtful
// characters get proposals; those of one place are rivals in a race, which the exact likelihood and the prior of mistakes
// decide.

import {logSoftmax} from "./sampler.js";

const WORD = /[\p{L}\p{N}]+/gu, LONGEST = 64;  // characters beside an edit in which its words are looked for
const DOUBLED = /(?<![\p{L}\p{N}_'’-])(\p{L}+)(\s+\1)(?![\p{L}\p{N}_'’-])/gu;
const byStart = (a, b) => a.start - b.start;
const span = (start, stop) => Array.from({length: Math.max(0, stop - start)}, (_, i) => start + i);

// The orders of a race: the places that are asked for at a time, with all that were asked for known.
const oneByOne = n => span(0, n).map(k => [k]);
const thirds = n => [0, 2, 1].map(third => span(0, n).filter(k => (n - 1 - k) % 3 === third));

// A text that may be meant in a place: what `edit` (null: nothing) makes of it. logp: of what was asked for so far.
// steps: what the network sees of it, and the places it is asked for.
function rivalOf(edit, text, cost, order, mask) {
  const steps = [], seen = text.map(() => mask);
  for (const places of order(text.length)) {
    const some = places.filter(k => text[k] !== mask);
    if (some.length) steps.push({seen: [...seen], some});
    for (const k of some) seen[k] = text[k];
  }
  return {edit, text, cost, logp: 0, done: 0, steps};
}
// At most its log-likelihood, less its cost. A substitution gains the mean of the two orders of the chain rule.
const scoreOf = ({edit, logp, cost}, before) =>
  (edit?.kind === "substitution" ? (before.logp + logp + edit.single) / 2 : logp) - cost;
const isDone = rival => rival.done === rival.steps.length;

// Edits of the text after others were made; without those that touch them.
const growth = ({ids, start, stop}) => ids.length - (stop - start);
const moved = (edits, made) => edits.filter(edit => made.every(other => edit.stop < other.start || other.stop < edit.start))
  .map(edit => {
    const shift = made.filter(other => other.stop < edit.start).reduce((sum, other) => sum + growth(other), 0);
    return {...edit, start: edit.start + shift, stop: edit.stop + shift};
  });

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

// Whether a word after other text is in capitals, or begins with one within a sentence.
const looksLikeAName = (word, before) =>
  word.length > 1 && /^\p{Lu}/u.test(word) && (word === word.toUpperCase() || /[\p{L}\p{N},]$/u.test(before));

// What more an edit, `fresh` for `old` between two texts, costs that turns words of the text, or a name, into unknown ones.
// logp: of its region
function costOfWords(counts, before, old, fresh, after, logp, {UNKNOWN_COST, NAME_LOGP}) {
  const left = before.match(/[\p{L}\p{N}]*$/u)[0], right = after.match(/^[\p{L}\p{N}]*/u)[0];
  const lead = before.slice(0, before.length - left.length).replace(/ +$/, ""), low = word => word?.toLowerCase();
  let [were, are] = [old, fresh].map(middle => (left + middle + right).match(WORD) ?? []);
  while (were.length && low(were[0]) === low(are[0])) [were, are] = [were.slice(1), are.slice(1)];
  while (were.length && low(were.at(-1)) === low(are.at(-1))) [were, are] = [were.slice(0, -1), are.slice(0, -1)];
  if (!were.length || are.every(word => counts.has(low(word)))) return 0;
  const times = word => were.filter(other => low(other) === low(word)).length;
  const isElsewhere = word => (counts.get(low(word)) ?? 0) > times(word);
  const isName = [were, are].every(words => looksLikeAName(words[0], lead));
  if (isName && logp < NAME_LOGP) return Infinity;
  return isName || were.every(isElsewhere) ? UNKNOWN_COST : 0;
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
// proofreader.py and the prior, from live_page.py; temperature: by which logits are divided.
export async function* proofread(predict, text, vocab, context, settings) {
  const {STRIDE, RUN_STRIDE, RUN, REACH, NEAR, RACE_LENGTH, APART, WIDTH, PRUNE, SLACK, ROUNDS,
          SUBSTITUTE, DELETE, SWAP, INSERT, INSERTED} = settings;
  const {temperature} = settings, counts = wordsOf(text);
  const prior = priorOf(vocab, settings);
  const mask = vocab.length, ids = new Map(vocab.map((own, id) => [own, id]));
  // A line end \r\n is read as \n, unless the model knows \r, and stays. Unknown characters are masks, and stay.
  const returns = text.includes("\r\n") && !ids.has("\r"), known = own => returns && own === "\r\n" ? "\n" : own;
  const ownOf = id => returns && vocab[id] === "\n" ? "\r\n" : vocab[id];
  const characters = text.match(returns ? /\r\n|[^]/gu : /[^]/gu) ?? [];
  const tokens = characters.map((own, number) => ({own, number, id: ids.get(known(own)) ?? mask}));
  const margin = context >> 3, spare = Math.ceil(margin / 4), stride = Math.max(1, context - 2 * margin);

  // Answer questions about masked places: [{row, at, id, ...}], row: ids; id: the character that is asked for, or -1.
  // Adds `logp` of it, and the best other one, `best`, with `bestLogp`: what was meant, most probably, if it was written.
  async function ask(questions) {
    for (const row of new Set(questions.map(question => question.row))) {
      const [logits] = await predict([row]);
      for (const question of questions.filter(each => each.row === row)) {
        const {at, id} = question, logp = logSoftmax(logits.slice(at * mask, (at + 1) * mask).map(z => z / temperature));
        const score = id < 0 ? logp : logp.map((p, v) => p + Math.fround(prior.wrong(id, v)));
        const best = score.reduce((a, p, v) => v !== id && (a < 0 || p > score[a]) ? v : a, -1);
        Object.assign(question, {logp: logp[id], best, bestLogp: logp[best]});
      }
    }
    return questions;
  }

  // Lay pieces of other text into rows of ids: [{start, stop, other, ...}], in order. Adds `row` and `at`. Those that are
  // APART share a row, if it fits into the context.
  function laid(ids, pieces) {
    const rows = [];  // {row, end}: the end in the text of those that are there
    for (const piece of pieces) {
      const {start, stop, other} = piece, more = ids.length + other.length - (stop - start);
      let here = rows.find(({row, end}) => start >= end + APART && row.length - end + more <= context);
      if (!here) rows.push(here = {row: [], end: 0});
      here.row.push(...ids.slice(here.end, start));
      Object.assign(piece, {row: here.row, at: here.row.length});
      here.row.push(...other);
      here.end = stop;
    }
    for (const {row, end} of rows) row.push(...ids.slice(end));
    return pieces;
  }

  // 1. Doubt: each character masked, the first of a run of masks, of which there is one every so many characters.
  function maskedOnce(ids, places, every, run) {
    const rows = span(0, every).map(phase => ids.map((id, i) => ((i - phase) % every + every) % every < run ? mask : id));
    return ask(places.map(i => ({row: rows[i % every], at: i, id: ids[i]})));
  }

  // 2. Propose: another character, one more, one less, two swapped, or the second of two equal words less.
  async function propose(ids, begin, end) {
    const edits = [], seams = [], unknown = {pBefore: null, pAfter: null};
    const places = span(begin, end).filter(i => ids[i] !== mask);
    const alone = await maskedOnce(ids, places, STRIDE, 1), inRun = await maskedOnce(ids, places, RUN_STRIDE, RUN);
    const of = new Map(alone.map(({at, logp}) => [at, logp]));
    alone.forEach(({at: i, id, logp, best, bestLogp}, k) => {
      const p = Math.exp(logp), run = inRun[k].logp, single = bestLogp - logp, where = {start: i, stop: i + 1};
      const cost = prior.substitution(id, best);
      if (single - cost > SUBSTITUTE)
        edits.push({...where, ids: [best], kind: "substitution", cost, single, pBefore: p, pAfter: Math.exp(bestLogp)});
      if (logp + run / 2 < DELETE) {
        const around = [...ids.slice(Math.max(0, i - 1), i), ...ids.slice(i + 1, i + 2)];
        edits.push({...where, ids: [], kind: "deletion", cost: prior.deletion(id, around), pBefore: p, pAfter: null});
      }
      if (of.has(i + 1) && ids[i + 1] !== id && logp + of.get(i + 1) + run < SWAP)
        edits.push({start: i, stop: i + 2, ids: [ids[i + 1], id], kind: "swap", cost: prior.cost, ...unknown});
      if ((of.get(i - 1) ?? 0) + logp + run < INSERT) seams.push(i);
    });
    const read = ids.map(id => vocab[id]?.length === 1 ? vocab[id] : "\0").join("");
    for (const match of read.matchAll(DOUBLED)) {
      const stop = match.index + match[0].length, start = stop - match[2].length;
      if (match.index < begin || stop > end) continue;
      edits.push({start, stop, ids: [], kind: "deletion", cost: prior.cost, ...unknown});
    }
    return [...edits, ...await filled(ids, ids.length < context ? seams : [])];
  }

  // Insertions of the likeliest character.
  async function filled(ids, seams) {
    const pieces = laid(ids, seams.map(j => ({start: j, stop: j, other: [mask], id: -1})));
    return (await ask(pieces)).filter(({bestLogp}) => bestLogp > INSERTED).map(({start, stop, best, bestLogp}) =>
      ({start, stop, ids: [best], kind: "insertion", cost: prior.cost, pBefore: null, pAfter: Math.exp(bestLogp)}));
  }

  // A place in which edits are rivals, and what is there, which is known first; then the best go on first.
  function raceOf(ids, edits, order, slack) {
    const start = edits[0].start, stop = Math.min(ids.length, Math.max(...edits.map(edit => edit.stop)) + REACH);
    const before = rivalOf(null, ids.slice(start, stop), 0, order, mask);
    const rivals = [before, ...edits.map(edit => rivalOf(edit,
      [...ids.slice(start, edit.start), ...edit.ids, ...ids.slice(edit.stop, stop)], edit.cost, order, mask))];
    return {start, stop, before, rivals, everyone: rivals, slack};
  }

  // What the network sees of the rivals that go on.
  function next(race) {
    if (!race.before.done) return race.before.steps.map(({seen}) => seen);
    const score = rival => scoreOf(rival, race.before), best = Math.max(...race.rivals.filter(isDone).map(score));
    race.rivals = race.rivals.filter(rival => score(rival) >= best - race.slack || !rival.edit);
    const going = race.rivals.filter(rival => !isDone(rival)).sort((a, b) => score(b) - score(a));
    return [...new Map(going.map(({steps, done}) => [steps[done].seen.join(), steps[done].seen])).values()].slice(0, WIDTH);
  }

  // 3. Prune: races of edits near each other, when they are decided.
  async function race(ids, edits, order, slack) {
    const places = [];
    for (const edit of [...edits].sort(byStart)) {
      const here = places.at(-1);
      if (here && edit.start <= Math.min(here.at(-1).start + NEAR, here[0].start + RACE_LENGTH)) here.push(edit);
      else places.push([edit]);
    }
    const races = places.map(place => raceOf(ids, place, order, slack));
    for (;;) {
      const steps = races.flatMap(each => next(each).map(seen => ({race: each, start: each.start, stop: each.stop, other: seen})));
      if (!steps.length) break;
      const questions = [];
      for (const {race, other, row, at} of laid(ids, steps)) {
        const key = other.join();
        for (const rival of race.rivals.filter(each => !isDone(each) && each.steps[each.done].seen.join() === key))
          for (const k of rival.steps[rival.done++].some) questions.push({rival, row, at: at + k, id: rival.text[k]});
      }
      for (const {rival, logp} of await ask(questions)) rival.logp += logp;
    }
    return races;
  }

  // 4. Decide, by the chain rule: {left, ahead}: the edits that are left with their gains, and those that were not seen to
  // be less likely than what is there.
  async function decide(ids, edits) {
    const leftOf = races => races.flatMap(({before, rivals}) => rivals.filter(rival => rival.edit)
      .map(rival => ({...rival.edit, gain: scoreOf(rival, before) + rival.cost - before.logp, logp: rival.logp})));
    const pruned = await race(ids, edits, thirds, PRUNE);
    const ahead = pruned.flatMap(({before, everyone}) =>
      everyone.filter(rival => rival.edit && scoreOf(rival, before) >= before.logp).map(({edit}) => edit));
    return {left: leftOf(await race(ids, leftOf(pruned), oneByOne, SLACK)), ahead};
  }

  // The edits that are kept, the best first, without those near a better one. An edit is kept if it and the edits near
  // it, each another account of the same mistake, are together likelier than no mistake.
  function bestApart(window, edits) {
    const textOf = (start, stop) => window.slice(Math.max(0, start), stop).map(token => token.own).join("");
    const excess = new Map(edits.map(({start, stop, ids, kind, gain, cost, logp}, i) => {  // log-odds
      const old = textOf(start, stop);
      const fresh = kind === "swap" ? textOf(start + 1, stop) + textOf(start, start + 1) : ids.map(id => vocab[id]).join("");
      const around = [textOf(start - LONGEST, start), old, fresh, textOf(stop, stop + LONGEST)];
      return [edits[i], gain - cost - costOfWords(counts, ...around, logp, settings)];
    }));
    const kept = [], byExcess = (a, b) => excess.get(b) - excess.get(a) || byStart(a, b);
    for (const edit of [...edits].sort(byExcess)) {
      const isFar = other => edit.start >= other.stop + REACH || other.start >= edit.stop + REACH;
      const accounts = edits.filter(other => Math.abs(other.start - edit.start) <= NEAR);
      const odds = accounts.reduce((sum, other) => sum + Math.exp(excess.get(other)), 0);
      if (odds > 1 && kept.every(isFar)) kept.push(edit);
    }
    return kept.sort(byStart);
  }

  // Correct the characters begin..end of a window, in rounds: {window, made}. made: [{key, edit}], where a key is half
  // more than the number of the character before an edit.
  async function correct(window, begin, end) {
    const made = [];
    let near = null, proposed;  // in later rounds: only what is near a change
    for (let round = 0; round < ROUNDS; round++) {
      const ids = window.slice(0, context - spare).map(token => token.id);  // insertions may exceed it
      if (!near) proposed = await propose(ids, begin, Math.min(end, ids.length));
      const fits = edit => edit.stop <= ids.length && growth(edit) <= context - ids.length;
      const {left, ahead} = await decide(ids, proposed.filter(fits));
      const edits = bestApart(window, left);
      if (!edits.length) break;
      let shift = 0;
      near = new Set();
      window = [...window];
      for (const edit of edits) {
        const start = edit.start + shift, old = window.slice(start, edit.stop + shift);
        const fresh = edit.ids.map((id, k) => ({id, isChanged: true, number: old[k]?.number ?? null,
                                                own: edit.kind === "swap" ? old[1 - k].own : ownOf(id)}));
        const known = window.slice(0, start).map(token => token.number).filter(number => number !== null);
        made.push({key: (known.length ? Math.max(...known) : -1) + .5, edit});
        window.splice(start, old.length, ...fresh);
        for (const i of span(start - REACH, start + fresh.length + REACH)) near.add(i);
        shift += fresh.length - old.length;
      }
      end += shift;
      proposed = moved(ahead, edits).filter(edit => near.has(edit.start));
    }
    return {window, made};
  }

  let before = [];  // corrected tokens
  for (let at = 0; at < tokens.length;) {
    const ahead = tokens.slice(at, at + Math.max(stride + margin - spare, 1)), own = ahead.slice(0, stride), begin = before.length;
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
