// Runs the model in a worker thread, so that the page stays responsive.
import {open, predict} from "./model.js";
import {plan, rank, unmask} from "./sampler.js";

const FILLS = 16, SHOWN = 5;
let mask, current = 0;  // current: the number of the newest request; older ones stop

// Write a text, and post each step.
async function write({id, ids, ...how}) {
  const begun = performance.now(), row = plan(ids, 0, mask, how), steps = row.reveals + row.corrections;
  let calls = 0;
  for await (const [frame] of unmask(predict, [row], mask, how)) {
    if (id !== current) return;
    postMessage({id, frame, ids: row.ids, steps, calls: ++calls, seconds: (performance.now() - begun) / 1000});
  }
  postMessage({id, done: true});
}

// Find the likeliest of many fills of a template, as sample.py --infill does, and post them.
async function writeRanked({id, ids, ...how}) {
  const begun = performance.now();
  const rows = Array.from({length: FILLS}, (_, sample) => plan(ids, sample, mask, how)), films = rows.map(() => []);
  let tried = 0;
  const look = async seen => {
    const found = [];
    for (const row of seen) {
      if (id !== current) throw null;
      postMessage({id, tried: ++tried});
      found.push(...await predict([row]));
    }
    return found;
  };
  for await (const frames of unmask(look, rows, mask, how)) frames.forEach((frame, r) => films[r].push(frame));
  const texts = rows.map(row => row.ids.join());
  const different = rows.filter((row, r) => texts.indexOf(texts[r]) === r).map(row => row.ids);
  const fills = await rank(look, different, ids.indexOf(mask), SHOWN, mask);
  const total = fills.reduce((sum, fill) => sum + Math.exp(fill.logp), 0);
  const seconds = (performance.now() - begun) / 1000;
  postMessage({id, seconds, tried, fills: fills.map(({ids, logp}) =>
    ({ids, logp, share: Math.exp(logp) / total, frames: films[texts.indexOf(ids.join())]}))});
}

async function answer(data) {
  if (data.id !== current || data.stop) return;  // a newer request has arrived, or none is wanted any more
  try {
    if (data.about) {
      mask = data.about.mask;
      let loading = true;
      const report = (loaded, total) => loading && postMessage({loaded, total});
      const ready = await open(data.about, data.device, report).finally(() => loading = false);  // a load may go on
      postMessage({ready});
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
