// Runs the model in a worker thread, so that the page stays responsive.
import {open, predict} from "./model.js";
import {proofread} from "./proofread.js";
import {plan, rank, unmask} from "./sampler.js";
import {search} from "./search.js";

const FILLS = 16, SHOWN = 5, RANKED = 3;
let context, mask, proofreading, current = 0;  // current: the number of the newest request; older ones stop

// A `predict` that posts how many calls were made, and ends a request that is not the newest. Its `expect` posts how many
// more calls are left at most in a stretch of the text.
function counted(id) {
  const look = async seen => {
    const found = [];
    for (const row of seen) {
      if (id !== current) throw null;
      postMessage({id, tried: ++look.tried});
      found.push(...await predict([row]));
    }
    return found;
  };
  const expect = (left, stretch, stretches) => postMessage({id, tried: look.tried, left, stretch, stretches});
  return Object.assign(look, {tried: 0, expect});
}

// Write a text, and post each step. Gaps of unknown length have their likeliest lengths then, which a search finds.
async function write({id, ids, segments, matches, ...how}) {
  const begun = performance.now();
  if (segments) {
    const look = counted(id);
    const [likeliest] = await search(look, segments, RANKED, mask, {context, expect: look.expect, ...how});
    ({given: ids, matches} = likeliest);
  }
  const row = plan(ids, 0, mask, {...how, matches}), steps = row.reveals + row.corrections;
  postMessage({id, given: ids, steps});
  let calls = 0;
  for await (const [frame] of unmask(predict, [row], mask, how)) {
    if (id !== current) return;
    postMessage({id, frame, calls: ++calls, seconds: (performance.now() - begun) / 1000});
  }
  postMessage({id, done: true});
}

// Draw fills of a template, and return the likeliest.
async function drawFills(look, ids, how) {
  const rows = Array.from({length: FILLS}, (_, sample) => plan(ids, sample, mask, how)), films = rows.map(() => []);
  const start = ids.indexOf(mask), toRank = (ids.length - start) * FILLS;
  look.expect(toRank + rows.reduce((sum, row) => sum + row.reveals + row.corrections, 0), 1, 1);
  for await (const frames of unmask(look, rows, mask, how)) frames.forEach((frame, r) => films[r].push(frame));
  const texts = rows.map(row => row.ids.join());
  const different = rows.filter((row, r) => texts.indexOf(texts[r]) === r).map(row => row.ids);
  look.expect((ids.length - start) * different.length, 1, 1);
  const fills = await rank(look, different, start, SHOWN, mask);
  return fills.map(fill => ({...fill, given: ids, frames: films[texts.indexOf(fill.ids.join())]}));
}

// Find the likeliest of many fills of a template, as sample.py --infill does, and post them.
async function writeRanked({id, ids, segments, ...how}) {
  const begun = performance.now(), look = counted(id);
  const fills = segments ? await search(look, segments, SHOWN, mask, {context, expect: look.expect, ...how})
    : await drawFills(look, ids, how);
  const total = fills.reduce((sum, fill) => sum + Math.exp(fill.logp), 0);
  const seconds = (performance.now() - begun) / 1000;
  postMessage({id, seconds, tried: look.tried, fills: fills.map(({ids, given, logp, frames}) =>
    ({ids, given, logp, share: Math.exp(logp) / total, frames}))});
}

// Proofread a text, and post the parts of each window.
async function fix({id, text, vocab}) {
  for await (const parts of proofread(counted(id), text, vocab, context, proofreading)) postMessage({id, parts});
  postMessage({id, done: true});
}

async function answer(data) {
  if (data.id !== current || data.stop) return;  // a newer request has arrived, or none is wanted any more
  try {
    if (data.about) {
      ({mask, context, proofreading} = data.about);
      let loading = true;
      const report = (loaded, total) => loading && postMessage({loaded, total});
      const ready = await open(data.about, data.device, report).finally(() => loading = false);  // a load may go on
      postMessage({ready});
    } else if (data.text) {
      await fix(data);
    } else {
      await (data.rank ? writeRanked : write)(data);
    }
  } catch (error) {
    if (error !== null) postMessage({id: data.id, error: String(error)});
  }
}

let last = Promise.resolve();  // answers one after another: a session cannot run twice at the same time
onmessage = ({data}) => {
  current = data.id;
  last = last.then(() => answer(data));
};
