// Lesson 6: the probability of one text by two orders, and their mean.
import {define, encode, h, logpAt, model, nats, addUp, visible} from "./common.js";
import {uniform} from "../../support/web/assets/sampler.js";

const ORDERS = {left: "left to right", right: "right to left", random: "random"};

define("two-orders", {
  title: "One text, two orders",
  about: "A text is revealed one character at a time, in two orders. Each bar is −ln p of a character given what is " +
    "visible; their sum is −ln p of the whole text by that order.",
  fields: {text: "my lord", first: "left", second: "random", seed: 1},
  needsModel: true,
  build(widget) {
    const {values} = widget;
    widget.text("text", "text", {maxLength: 24});
    widget.choice("first", "one order", ORDERS);
    widget.choice("second", "another", ORDERS);
    widget.button("Other random order", () => widget.set("seed", values.seed % 999 + 1));
    return async isOld => {
      const x = encode(values.text), n = x.length, places = [...x.keys()], names = [values.first, values.second];
      const found = [];
      for (const [k, name] of names.entries()) {
        const noise = uniform(values.seed, k, 0, n, "noise");
        const order = {left: places, right: [...places].reverse(), random: [...places].sort((a, b) => noise[a] - noise[b])}[name];
        const seen = x.map(() => model.mask), steps = [];
        for (const at of order) {
          const [logp] = await logpAt(seen, [at]);
          if (isOld()) return;
          seen[at] = x[at];
          steps.push({at, loss: -logp[x[at]], seen: [...seen]});
          widget.say(`call ${n * k + steps.length} of ${2 * n}`);
        }
        found.push(steps);
      }
      const totals = found.map(steps => addUp(steps.map(({loss}) => loss))), most = Math.max(...found.flat().map(({loss}) => loss), 1);
      widget.view.replaceChildren(h("div", {className: "orders"}, found.map((steps, k) => h("table", {},
        h("caption", {}, ORDERS[names[k]]),
        steps.map(({at, loss, seen}) => h("tr", {}, h("td", {}, h("code", {}, seen.map((id, i) =>
          id === model.mask ? h("i", {}, "█") : i === at ? h("b", {}, visible(model.vocab[id])) : visible(model.vocab[id])))),
        h("td", {}, nats(loss)), h("td", {className: "loss", "--p": loss / most}))),
        h("tr", {className: "total"}, h("td", {}, "sum, in nats"), h("td", {}, nats(totals[k])), h("td"))))));
      const least = Math.min(...totals), mean = least - Math.log(addUp(totals.map(t => Math.exp(least - t))) / 2), bound = addUp(totals) / 2;
      Object.assign(widget.view.dataset, {totals: JSON.stringify(totals), mean, bound});
      const gap = Math.abs(totals[0] - totals[1]);
      widget.say(`Both sums are −ln p of the same text: a model that knew the true conditionals would have one number, this ` +
        `one has two, ${nats(gap)} nats apart. A model that picks one of these orders at random has −ln p = ${nats(mean)}, ` +
        `and the mean of the two sums, ${nats(bound)}, is a bound on it.`);
    };
  },
});
