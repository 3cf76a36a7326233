// Lesson 1: a sentence, a mask rate, and the model's guesses under each mask.
import {bars, define, encode, h, logpAt, model, nats, percent, addUp, visible} from "./common.js";
import {uniform} from "../../support/web/assets/sampler.js";

define("mask-rate", {
  title: "Your sentence under masks",
  about: "Type a sentence, then drag the mask rate. Under each mask are the model’s likeliest characters; the true one " +
    "is blue. The model learned from plays of Shakespeare.",
  fields: {text: "To be, or not to be: that is the question", rate: 20, seed: 1},
  needsModel: true,
  build(widget) {
    widget.text("text", "sentence", {maxLength: 100});
    widget.range("rate", "mask rate", 0, 100, 1, value => `${value} %`);
    widget.button("Other masks", () => widget.set("seed", widget.values.seed % 999 + 1));
    const curve = new Map();  // of this sentence: mask rate -> loss, for each rate that was tried
    let drawn = "";
    return async isOld => {
      const {text, rate, seed} = widget.values, x0 = encode(text), n = x0.length;
      const order = uniform(seed, 0, 0, n, "noise").map((u, i) => [u, i]).sort((a, b) => a[0] - b[0]).map(([, i]) => i);
      const masked = order.slice(0, Math.round(rate / 100 * n)).sort((a, b) => a - b);  // a higher rate only adds masks
      const xt = x0.map((id, i) => masked.includes(i) ? model.mask : id);
      const logp = masked.length ? await logpAt(xt, masked) : [];
      if (isOld()) return;
      if (drawn !== text) curve.clear();
      drawn = text;
      widget.view.replaceChildren(h("ol", {className: "cells"}, Array.from(text, (c, i) => {
        const k = masked.indexOf(i);
        if (k < 0) return h("li", {}, visible(c));
        return h("li", {className: "masked", "aria-label": `masked, it was ${visible(c)}`},
          h("b", {}, "█"), bars(logp[k], x0[i]));
      })));
      if (!masked.length) return widget.say("Nothing is masked: there is nothing to predict.");
      const loss = addUp(masked.map((at, k) => -logp[k][x0[at]])) / masked.length;
      const right = masked.filter((at, k) => logp[k][x0[at]] === Math.max(...logp[k])).length;
      curve.set(masked.length / n, loss);
      widget.view.append(plot(curve));
      widget.say(`${masked.length} of ${n} characters are masked. The likeliest guess is right at ${right}. ` +
        `Loss: ${nats(loss)} nats per masked character.`);
    };
  },
});

// The losses so far over the mask rate, 0 to 4.17 (a guess that knows nothing).
function plot(curve) {
  const x = rate => 40 + 300 * rate, y = loss => 128 - 26 * Math.min(loss, 4.6);
  const top = Math.log(model.mask), points = [...curve].sort((a, b) => a[0] - b[0]);
  return h("svg", {viewBox: "0 0 360 160", class: "plot", role: "img", "aria-label": "loss against mask rate"},
    [0, top].map(loss => h("line", {x1: x(0), x2: x(1), y1: y(loss), y2: y(loss)})),
    h("text", {x: x(0) + 2, y: y(top) - 5}, `${nats(top)}: knowing nothing`),
    h("text", {x: x(0) - 6, y: y(0) + 4, "text-anchor": "end"}, "0"),
    [0, .5, 1].map(rate => h("text", {x: x(rate), y: 150, "text-anchor": ["start", "middle", "end"][2 * rate]}, `${100 * rate} % masked`)),
    h("path", {d: points.map(([rate, loss], i) => `${i ? "L" : "M"}${x(rate)} ${y(loss)}`).join("")}),
    points.map(([rate, loss]) => h("circle", {cx: x(rate), cy: y(loss), r: 3.5},
      h("title", {}, `${percent(rate)} masked: ${nats(loss)} nats`))));
}
