// Lessons 7 and 8: a GPT against the model, and orders of the model against each other, on one prompt.
import {colorOf, define, encode, h, logpAt, model, nats, openGPT, predict} from "./common.js";
import {drawToken, plan, uniform, unmask} from "../../support/web/assets/sampler.js";

// What each order reveals first: the least score.
const SCORES = {left: (i, u) => i, random: (i, u) => u, confidence: (i, u, p) => -p};

// Fill the masks of a text in some calls of a network. Yields, after each, [[position, id]] of what it revealed.
async function* reveal(order, ids, calls, seed, look = predict) {
  const x = [...ids], gaps = [...x.keys()].filter(i => x[i] === model.mask);
  for (let s = 0; s < Math.min(calls, gaps.length); s++) {
    const masked = gaps.filter(i => x[i] === model.mask), left = Math.floor(gaps.length * (calls - 1 - s) / calls + 1e-9);
    const u = uniform(seed, s, 0, x.length, "token"), noise = uniform(seed, s, 0, x.length, "noise");
    const logp = await logpAt(x, masked, look);
    const drawn = masked.map((i, k) => {
      const id = drawToken(logp[k], u[i], 1);
      return {i, id, score: SCORES[order](i, noise[i], logp[k][id])};
    }).sort((a, b) => a.score - b.score).slice(0, Math.max(masked.length - left, 1));
    for (const {i, id} of drawn) x[i] = id;
    yield drawn.map(({i, id}) => [i, id]);
  }
}

async function* corrected(ids, steps, seed) {
  const row = plan(ids, 0, model.mask, {seed, steps});
  for await (const [frame] of unmask(predict, [row], model.mask, {seed, temperature: 1})) yield frame;
}

const LANES = [
  {name: "left to right, one a call (as a GPT)", calls: (_, n) => n, run: (ids, calls, seed) => reveal("left", ids, calls, seed)},
  {name: "random order", calls: calls => calls, run: (ids, calls, seed) => reveal("random", ids, calls, seed)},
  {name: "the surest first", calls: calls => calls, run: (ids, calls, seed) => reveal("confidence", ids, calls, seed)},
  {name: "far apart, then corrections (sample.py)", calls: calls => calls, run: corrected},
];

// Let lanes {name, n, frames} fill the masks of ids, a call of each in turn. Adds to each x, its ids, and its elements.
async function race(widget, ids, lanes, isOld) {
  for (const one of lanes) {
    const text = h("pre", {className: "output lane-text"}), count = h("output", {}, `0 of ${one.n}`);
    const lane = h("li", {}, h("div", {className: "lane"}, h("b", {}, one.name), count), text);
    Object.assign(one, {x: [...ids], when: {}, done: 0, text, count, lane});
  }
  widget.view.replaceChildren(h("ol", {className: "lanes"}, lanes.map(({lane}) => lane)));
  const show = ({x, when, n, text}) => text.replaceChildren(...x.map((id, i) =>
    id === model.mask ? h("i", {}, "█") : ids[i] !== model.mask ? h("b", {}, model.vocab[id])
      : h("span", {"--color": colorOf(n > 1 ? when[i] / (n - 1) : 1)}, model.vocab[id])));
  lanes.forEach(show);
  widget.say("Each lane takes a call, in turn.");
  for (let racing = [...lanes]; racing.length;) {
    for (const one of racing) {
      const {value, done} = await one.frames.next();
      if (isOld()) return;
      if (done) {
        one.isDone = true;
        one.count.textContent = `done in ${one.done} call${one.done === 1 ? "" : "s"}`;
        one.lane.dataset.calls = one.done;
        continue;
      }
      for (const [i, id] of value) {
        one.x[i] = id;
        one.when[i] = one.done;
      }
      one.count.textContent = `call ${++one.done} of ${one.n}`;
      show(one);
    }
    racing = racing.filter(one => !one.isDone);
  }
}

// The ids of a beginning, masks, and an end.
function withGap(begin, length, end = "") {
  const ids = [begin, end].map(text => text ? encode(text) : []);
  const all = [...ids[0], ...Array(length).fill(model.mask), ...ids[1]];
  if (all.length > model.context) throw `The model takes ${model.context} characters; shorten the text.`;
  return all;
}

define("gpt-race", {
  title: "A GPT and a diffusion model",
  about: "Both have read the same plays. The GPT writes from left to right, one character in each call; the diffusion " +
    "model writes anywhere, in as many calls as you choose. Type an ending, too: only the diffusion model sees it.",
  fields: {text: "ROMEO:\nMy lord, ", end: "\n\nJULIET:", length: 96, calls: 24, order: "corrected", seed: 1},
  needsModel: true,
  build(widget) {
    const {values} = widget;
    widget.text("text", "beginning", {rows: 2, maxLength: 100});
    widget.text("end", "ending", {rows: 3, maxLength: 50, placeholder: "(none)"});
    widget.range("length", "new characters", 8, 96, 8);
    widget.range("calls", "calls of the diffusion model", 1, 96);
    widget.choice("order", "its sampler", {corrected: "with corrections (lesson 8)", random: "plain, in random order"});
    widget.button("Race", () => widget.update(), {className: "main"});
    widget.button("Another draw", () => widget.set("seed", values.seed % 999 + 1));
    let gpt = null;
    return async isOld => {
      const tell = (loaded, total) => widget.say(`loading the GPT: ${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`);
      const {predict: look, parameters} = await (gpt ??= openGPT(tell));
      if (isOld()) return;
      const {length, calls, seed} = values, ids = withGap(values.text, length, values.end);
      const run = values.order === "random" ? reveal("random", ids, calls, seed) : corrected(ids, calls, seed);
      const lanes = [
        {name: `GPT, ${parameters.toFixed(1)} M parameters`, n: length, frames: reveal("left", ids, length, seed, look)},
        {name: `diffusion, ${model.about.split(" in ")[0]}`, n: calls, frames: run},
      ];
      await race(widget, ids, lanes, isOld);
      if (isOld()) return;
      widget.say(`The GPT needed ${lanes[0].done} calls, the diffusion model ${lanes[1].done}. Color: early to late calls. ` +
        "Which text reads better?" + (values.end ? " Which one leads up to the ending?" : ""));
    };
  },
});

define("race", {
  title: "A race of orders",
  about: "Each lane fills the same masks with the same model. All take one call at a time; only the order, and how many " +
    "characters a call reveals, differ.",
  fields: {text: "ROMEO:\nMy lord, ", length: 48, calls: 12, seed: 1},
  needsModel: true,
  build(widget) {
    const {values} = widget;
    widget.text("text", "beginning", {rows: 2, maxLength: 120});
    widget.range("length", "new characters", 8, 96, 8);
    widget.range("calls", "calls", 1, 64);
    widget.button("Race", () => widget.update(), {className: "main"});
    const rate = widget.button("How probable are they?", () => score(), {disabled: true});
    widget.button("Another draw", () => widget.set("seed", values.seed % 999 + 1));
    let finished = null;

    // −log p of the new text by the chain rule, from left to right: a call for each character.
    async function score() {
      const lanes = finished;
      rate.disabled = true;
      for (const one of lanes) {
        let loss = 0;
        for (let i = one.x.length - values.length; i < one.x.length; i++) {
          const [logp] = await logpAt(one.x.slice(0, i), [i]);
          if (finished !== lanes) return;
          loss -= logp[one.x[i]];
          widget.say(`The model reads the texts from left to right: ${i + 1} of ${one.x.length} characters.`);
        }
        one.lane.dataset.loss = loss / values.length;
        one.count.textContent += `, ${nats(loss / values.length)} nats per character`;
      }
      widget.say("Nats per character: −log p of the new text, from left to right. Probable is not all of good: a text that " +
        "repeats itself is probable, too.");
    }

    return async isOld => {
      finished = null;
      rate.disabled = true;
      const ids = withGap(values.text, values.length);
      const lanes = LANES.map(({name, calls, run}) => {
        const n = calls(values.calls, values.length);
        return {name, n, frames: run(ids, n, values.seed)};
      });
      await race(widget, ids, lanes, isOld);
      if (isOld()) return;
      finished = lanes;
      rate.disabled = false;
      widget.say("Color: early to late calls. Which lane reads best, for how many calls?");
    };
  },
});
