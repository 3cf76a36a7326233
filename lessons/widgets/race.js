// Lessons 7 and 8: orders and numbers of calls, side by side on one prompt.
import {colorOf, define, encode, h, logpAt, model, nats, predict} from "./common.js";
import {drawToken, plan, uniform, unmask} from "../../support/web/assets/sampler.js";

// What each order reveals first: the least score.
const SCORES = {left: (i, u) => i, random: (i, u) => u, confidence: (i, u, p) => -p};

// Fill the masks of a text in some calls. Yields, after each, [[position, id]] of what it revealed.
async function* reveal(order, ids, calls, seed) {
  const x = [...ids], gaps = [...x.keys()].filter(i => x[i] === model.mask);
  for (let s = 0; s < Math.min(calls, gaps.length); s++) {
    const masked = gaps.filter(i => x[i] === model.mask), left = Math.floor(gaps.length * (calls - 1 - s) / calls + 1e-9);
    const u = uniform(seed, s, 0, x.length, "token"), noise = uniform(seed, s, 0, x.length, "noise");
    const logp = await logpAt(x, masked);
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
      const begin = values.text ? encode(values.text) : [], ids = [...begin, ...Array(values.length).fill(model.mask)];
      if (ids.length > model.context) throw `The model takes ${model.context} characters; shorten the text.`;
      const lanes = LANES.map(({name, calls, run}) => {
        const n = calls(values.calls, values.length), text = h("pre", {className: "output lane-text"}), count = h("output", {}, `0 of ${n}`);
        const lane = h("li", {}, h("div", {className: "lane"}, h("b", {}, name), count), text);
        return {x: [...ids], when: {}, n, done: 0, text, count, lane, frames: run(ids, n, values.seed)};
      });
      widget.view.replaceChildren(h("ol", {className: "lanes"}, lanes.map(({lane}) => lane)));
      const show = ({x, when, n, text}) => text.replaceChildren(...x.map((id, i) =>
        id === model.mask ? h("i", {}, "█") : i < begin.length ? h("b", {}, model.vocab[id])
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
      finished = lanes;
      rate.disabled = false;
      widget.say("Color: early to late calls. Which lane reads best, for how many calls?");
    };
  },
});
