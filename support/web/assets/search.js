// Fills a template with gaps of unknown length, as hypotheses() of support/infill/search.py does. Of a gap that must match
// every length that the automaton allows, or every text of a list, is tried with a few draws. Of any other gap one look at
// all lengths says which four are worth filling. All fills are ranked alike.

import {logSoftmax, plan, race, unmask} from "./sampler.js";

const DRAWS = 16, KEPT = 8, QUICK_STEPS = 8, LENGTHS = 4, AFTER = 4, SPARE = 1;  // as in sample.py

const isOpen = segment => segment.least !== undefined;
const floor = Math.floor, sum = values => values.reduce((total, v) => total + v, 0);

// How a gap of unknown length is filled: [{length, draws, ids}], `ids` for a text of a list, which needs no draw.
// Short gaps are drawn more often.
function waysToFill({lengths, texts}) {
  if (texts) return texts.map(ids => ({length: ids.length, draws: 1, ids}));
  const few = Math.floor(DRAWS / lengths.length);
  return lengths.map(length => ({length, draws: Math.max(1, few, Math.floor(DRAWS / (2 * Math.max(1, length))))}));
}

// Add the segments `stretch` to a fill, its gap of unknown length filled in one way.
function extended(fill, stretch, way, mask) {
  const ids = [...fill.ids], given = [...fill.given], matches = [...fill.matches], told = [];
  let end = 0;  // of the gap of unknown length
  for (const segment of stretch) {
    const start = ids.length, length = isOpen(segment) ? way.length : segment.length;
    if (segment.next && length) matches.push({start, length, next: segment.next, accepts: segment.accepts});
    if (isOpen(segment) && way.ids) told.push(...way.ids.map((_, i) => start + i));
    const blank = segment.ids ?? Array(length).fill(mask);
    ids.push(...(isOpen(segment) && way.ids || blank));
    given.push(...blank);
    if (isOpen(segment)) end = ids.length;
  }
  return {...fill, ids, given, matches, told, end, length: way.length, draws: way.draws, expected: fill.logp};
}

// The segments in stretches with at most one gap of unknown length each, which are filled one by one. A gap that ends the
// text and need not match is a stretch of its own.
function cutStretches(segments) {
  const last = segments.length - 1, open = [...segments.keys()].filter(i => isOpen(segments[i]));
  const starts = new Set([0, ...open.slice(1), ...segments[last].isAny ? [last] : []]), sorted = [...starts];
  return sorted.map((start, k) => segments.slice(start, sorted[k + 1]));
}

// Keep the `most` trials whose lengths are the most promising: `expected` gets log p of the first token after the gap,
// seen with the gap and AFTER tokens masked; what counts besides is the largest log p at each mask of the gap.
async function promising(predict, trials, most, mask) {
  const scored = [];
  for (const trial of trials) {
    const {ids, end} = trial, masks = [...ids.keys()].filter(i => ids[i] === mask);
    const [logits] = await predict([ids.map((id, i) => i >= end && i < end + AFTER ? mask : id)]);
    const logp = i => logSoftmax(logits.subarray(i * mask, (i + 1) * mask));
    const after = end < ids.length && ids[end] !== mask ? logp(end)[ids[end]] : 0;
    const expected = trial.expected + after, best = sum(masks.map(i => Math.max(...logp(i))));
    scored.push({...trial, expected, score: best + expected});
  }
  const kept = new Set([...scored].sort((a, b) => b.score - a.score).slice(0, most));
  return scored.filter(trial => kept.has(trial));
}

// Find the n likeliest fills of a template: [{ids, given, matches, logp, frames}], the best first. ids: the text; given:
// the same with `mask` in the gaps; matches: the gaps that must match, as `plan` takes them; frames: how it was drawn.
// segments: {ids}, {length}, {length, next, accepts} or, of unknown length, {least, lengths, texts, next, accepts}, where
// `least` is the smallest of the lengths, and `texts` are the ids of a list or null; isAny: it need not match. context: the
// most characters. end: the id of a line break, which ends a text that ends with such a gap, or null. expect: called with
// the largest number of rows that `predict` may still be given in a stretch, the number of this stretch, and of all.
export async function search(predict, segments, n, mask, {context, end, expect = () => {}, ...how}) {
  const stretches = cutStretches(segments), first = segments[0].ids?.length ?? 0;
  let fills = [{ids: [], given: [], matches: [], logp: 0, at: first, frames: []}];
  for (const [k, stretch] of stretches.entries()) {
    const isLast = k === stretches.length - 1, kept = isLast ? n : Math.max(n, KEPT);
    const later = sum(stretches.slice(k + 1).flat().map(({ids, length, least}) => ids?.length ?? length ?? least));
    const open = stretch.find(isOpen), atEnd = isLast && stretch[0] === open && open?.isAny && stretch.length === 1;
    const room = fill => context - fill.ids.length - later;
    const ways = fill => atEnd ? [{length: Math.min(open.lengths.at(-1), room(fill)), draws: DRAWS}]
      : open ? waysToFill(open) : [{length: 0, draws: DRAWS}];
    let trials = fills.flatMap(fill => ways(fill).map(way => extended(fill, stretch, way, mask)));
    trials = trials.filter(trial => trial.ids.length + later <= context);
    if (!trials.length) throw `No fill leaves room for the whole text in ${context} characters; shorten it.`;
    for (const trial of trials) trial.draws = Math.max(1, floor(trial.draws / fills.length));
    const most = Math.max(LENGTHS, n, 2 * fills.length), isChosen = open?.isAny && !atEnd && trials.length > most;
    const isEnded = isLast && isOpen(stretch.at(-1)) && !atEnd && end !== null;
    const toRank = ({ids, at}) => ids.length - at + Number(isEnded), tell = rows => expect(rows, k + 1, stretches.length);
    if (isChosen) {
      const share = 9 * DRAWS / 4 / fills.length;  // few lengths are left, so that there are more draws for each
      for (const trial of trials) trial.draws = Math.max(1, floor(share / (trial.length + 5)));
      const each = trials.map(trial => trial.draws * (QUICK_STEPS + toRank(trial))).sort((a, b) => b - a);
      tell(trials.length + sum(each.slice(0, most)));
      trials = await promising(predict, trials, most, mask);
    }
    const tried = trials.flatMap(trial => Array(trial.draws).fill(trial));
    const quick = open && !atEnd ? {...how, steps: Math.min(how.steps, QUICK_STEPS), correct: 0} : how;
    const rows = tried.map(({ids, matches}, r) => plan(ids, r, mask, {...quick, matches}));
    tell(sum(rows.map(row => row.reveals + row.corrections)) + sum(tried.map(toRank)));
    const films = rows.map(() => []), different = new Map();
    for await (const frames of unmask(predict, rows, mask, how))
      frames.forEach((frame, r) => frame.length && films[r].push(frame));
    rows.forEach((row, r) => {
      const {ids: blank, expected} = tried[r], start = atEnd ? blank.length - tried[r].length : blank.length;
      const after = row.ids.indexOf(end, start + 1), stop = after < 0 ? row.ids.length : after;  // a line break ends it
      let ids = atEnd ? row.ids.slice(0, stop + 1) : row.ids;
      if (isEnded && ids.length < context) ids = [...ids, end];
      const film = films[r].map(frame => frame.filter(([i]) => i < stop)).filter(frame => frame.length);
      const p = new Map(film.flat().map(([i, _, q]) => [i, q]));
      const score = expected + sum([...p.values()].map(Math.log));
      different.set(ids.join(), {...tried[r], ids, text: row.ids.slice(0, stop), film, score, scored: new Map()});
    });
    let found = [...different.values()];
    if (isChosen) found = found.sort((a, b) => b.score - a.score).slice(0, Math.max(kept, 3) + SPARE);
    // At the end of the text some fills may differ only in what ends them.
    const texts = new Set(found.map(({text}) => text.join())), again = found.length - texts.size;
    tell(sum(found.map(toRank)));
    const best = await race(predict, found, Math.min(kept, texts.size) + again, mask);
    // A text of a list was not drawn: what is shown is how it was scored.
    fills = best.filter(({text}) => texts.delete(text.join())).slice(0, kept)
      .map(({text, given, matches, told, logp, frames, film, scored}) => ({
        ids: text, given: given.slice(0, text.length), matches, logp, at: text.length,
        frames: [...frames, ...(told.length ? [told.map(i => scored.get(i))] : []), ...film],
      }));
  }
  return fills;
}
