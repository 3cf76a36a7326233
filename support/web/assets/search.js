// Fills a template with gaps of unknown length that must match, as hypotheses() of support/infill/search.py does: every
// length that the automaton allows, or every text of a list, is tried with a few draws, and all are ranked alike.

import {plan, race, unmask} from "./sampler.js";

const DRAWS = 16, KEPT = 8, QUICK_STEPS = 8;  // as in sample.py

const isOpen = segment => segment.least !== undefined;

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
  for (const segment of stretch) {
    const start = ids.length, length = isOpen(segment) ? way.length : segment.length;
    if (segment.next && length) matches.push({start, length, next: segment.next, accepts: segment.accepts});
    if (isOpen(segment) && way.ids) told.push(...way.ids.map((_, i) => start + i));
    const blank = segment.ids ?? Array(length).fill(mask);
    ids.push(...(isOpen(segment) && way.ids || blank));
    given.push(...blank);
  }
  return {ids, given, matches, told, logp: fill.logp, at: fill.at, frames: fill.frames};
}

// The segments in stretches with one gap of unknown length each, which are filled one by one.
function cutStretches(segments) {
  const starts = [0, ...[...segments.keys()].filter(i => isOpen(segments[i])).slice(1)];
  return starts.map((start, k) => segments.slice(start, starts[k + 1]));
}

// Find the n likeliest fills of a template: [{ids, given, matches, logp, frames}], the best first. ids: the text; given:
// the same with `mask` in the gaps; matches: the gaps that must match, as `plan` takes them; frames: how it was drawn.
// segments: {ids}, {length}, {length, next, accepts} or, of unknown length, {least, lengths, texts, next, accepts}, where
// `least` is the smallest of the lengths, and `texts` are the ids of a list or null. context: the most characters. end: the
// id of a line break, which ends a text that ends with such a gap, or null.
export async function search(predict, segments, n, mask, {context, end, ...how}) {
  const stretches = cutStretches(segments), first = segments[0].ids?.length ?? 0;
  let fills = [{ids: [], given: [], matches: [], logp: 0, at: first, frames: []}];
  for (const [k, stretch] of stretches.entries()) {
    const isLast = k === stretches.length - 1, tried = [], rows = [];
    const later = stretches.slice(k + 1).flat().reduce((sum, {ids, length, least}) => sum + (ids?.length ?? length ?? least), 0);
    for (const fill of fills) {
      for (const way of waysToFill(stretch.find(isOpen))) {
        const trial = extended(fill, stretch, way, mask);
        if (trial.ids.length + later > context) continue;
        const count = Math.max(1, Math.floor(way.draws / fills.length));
        const quick = {...how, steps: Math.min(how.steps, QUICK_STEPS), correct: 0, matches: trial.matches};
        for (let i = 0; i < count; i++) {
          tried.push(trial);
          rows.push(plan(trial.ids, rows.length, mask, quick));
        }
      }
    }
    if (!rows.length) throw `No fill leaves room for the whole text in ${context} characters; shorten it.`;
    const films = rows.map(() => []), different = new Map();
    for await (const frames of unmask(predict, rows, mask, how))
      frames.forEach((frame, r) => frame.length && films[r].push(frame));
    const isEnded = isLast && isOpen(stretch.at(-1)) && end !== null;
    rows.forEach((row, r) => {
      const ids = isEnded && row.ids.length < context ? [...row.ids, end] : row.ids;
      different.set(ids.join(), {...tried[r], ids, text: row.ids, film: films[r], scored: new Map()});
    });
    const best = await race(predict, [...different.values()], isLast ? n : Math.max(n, KEPT), mask);
    // A text of a list was not drawn: what is shown is how it was scored.
    fills = best.map(({text, given, matches, told, logp, frames, film, scored}) => ({
      ids: text, given, matches, logp, at: text.length,
      frames: [...frames, ...(told.length ? [told.map(i => scored.get(i))] : []), ...film],
    }));
  }
  return fills;
}
