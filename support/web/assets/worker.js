// Runs the model in a worker thread, so that the page stays responsive.
import {open, predict} from "./model.js";
import {proofread} from "./proofread.js";
import {plan, unmask} from "./sampler.js";
import {search} from "./search.js";

const SHOWN = 5;
let model, current = 0;  // current: the number of the newest request; older ones stop

// A `predict` that posts how many texts the network has seen, and ends a request that is not the newest.
function counted(id) {
  const look = async seen => {
    const found = [];
    for (const row of seen) {
      if (id !== current) throw null;
      postMessage({id, tried: ++look.tried, seen: row});
      found.push(...await predict([row]));
    }
    return found;
  };
  return Object.assign(look, {tried: 0});
}

// Write a text, and post each step. Gaps of unknown length have their likeliest lengths then, which a search finds.
async function write({id, ids, segments, matches, ...how}) {
  const begun = performance.now();
  if (segments) {
    const {fills: [likeliest]} = await search(counted(id), segments, 1, model);
    ({given: ids, matches} = likeliest);
  }
  const row = plan(ids, 0, model.mask, {...how, matches}), steps = row.reveals + row.corrections;
  postMessage({id, given: ids, steps});
  let calls = 0;
  for await (const [frame] of unmask(predict, [row], model.mask, how)) {
    if (id !== current) return;
    postMessage({id, frame, calls: ++calls, seconds: (performance.now() - begun) / 1000});
  }
  postMessage({id, done: true});
}

// Find the likeliest fills of a template, as sample.py --infill does, and post them.
async function writeRanked({id, segments, ...how}) {
  const begun = performance.now(), look = counted(id);
  const {fills, ...about} = await search(look, segments, SHOWN, model, how);
  const weight = ({logp}) => Math.exp(logp - fills[0].logp), all = fills.reduce((sum, fill) => sum + weight(fill), 0);
  const shared = fills.map(fill => ({...fill, share: weight(fill) / all}));
  postMessage({id, ...about, fills: shared, tried: look.tried, seconds: (performance.now() - begun) / 1000});
}

// Proofread a text, and post the parts of each window.
async function fix({id, text, vocab}) {
  const {context, proofreading} = model;
  for await (const parts of proofread(counted(id), text, vocab, context, proofreading)) postMessage({id, parts});
  postMessage({id, done: true});
}

async function answer(data) {
  if (data.id !== current || data.stop) return;  // a newer request has arrived, or none is wanted any more
  try {
    if (data.about) {
      model = data.about;
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
