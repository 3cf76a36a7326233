// Lesson 2: one masked character, the reader's guess and the model's, and what both cost in nats.
import {bars, define, encode, h, logpAt, model, nats, visible} from "./common.js";
import {uniform} from "../../support/web/assets/sampler.js";

// From the Sonnets, of which the model has read none.
const LINES = [
  "Shall I compare thee to a summer's day?", "Thou art more lovely and more temperate:",
  "So long as men can breathe or eyes can see,", "My mistress' eyes are nothing like the sun;",
  "When to the sessions of sweet silent thought", "Let me not to the marriage of true minds",
  "That time of year thou mayst in me behold", "Love's not Time's fool, though rosy lips",
];

define("you-are-the-model", {
  title: "You are the model",
  about: "Guess the character at the marked mask, and say how sure you are. Your loss is −ln of the probability that you " +
    "gave to the true one: what you do not give to your guess is spread over the 64 others.",
  fields: {round: 1, rate: 40, text: ""},
  needsModel: true,
  build(widget) {
    const {values} = widget, totals = {rounds: 0, you: 0, model: 0};
    widget.range("rate", "mask rate", 10, 90, 10, value => `${value} %`);
    const typed = h("input", {maxLength: 1, size: 2, className: "one", autocomplete: "off", onkeydown: e => e.key === "Enter" && answer()});
    widget.label("your guess", typed);
    const output = h("output", {}, "50 %"), sure = h("input", {type: "range", min: 1, max: 99, value: 50});
    sure.addEventListener("input", () => { output.textContent = `${sure.value} %`; });
    widget.label("how sure", sure, output);
    const check = widget.button("Answer", () => answer(), {className: "main"});
    const next = widget.button("Next", () => { widget.set("round", values.round + 1); typed.focus({preventScroll: true}); });
    let now = null;  // {x0, at, logp} of this round, until it is answered

    function answer() {
      if (!now) return;
      if (!model.ids.has(typed.value)) return widget.say("Type one character, which may be a space.", true);
      const {x0, at, logp} = now, p = sure.value / 100, isRight = model.ids.get(typed.value) === x0[at];
      const you = -Math.log(isRight ? p : (1 - p) / (model.mask - 1)), its = -logp[x0[at]];
      now = null;
      totals.rounds++;
      totals.you += you;
      totals.model += its;
      check.disabled = true;
      const mean = total => nats(total / totals.rounds);
      const scores = [["you", you, totals.you], ["the model", its, totals.model],
        ["knowing nothing", Math.log(model.mask), totals.rounds * Math.log(model.mask)]];
      widget.view.append(h("div", {className: "reveal"}, bars(logp, x0[at], 6), h("table", {},
        h("tr", {}, ["nats", "this round", `mean of ${totals.rounds}`].map(text => h("th", {scope: "col"}, text))),
        scores.map(([who, loss, total]) => h("tr", {}, h("th", {scope: "row"}, who), h("td", {}, nats(loss)), h("td", {}, mean(total)))))));
      widget.view.querySelector(".target").textContent = visible(model.vocab[x0[at]]);
      widget.say(`It was “${visible(model.vocab[x0[at]])}”. You: ${nats(you)} nats. The model: ${nats(its)} nats.`);
    }

    return async isOld => {
      now = null;
      const text = values.text || LINES[(values.round - 1) % LINES.length], x0 = encode(text), n = x0.length;
      const noise = uniform(values.round, 0, 0, n, "noise").map((u, i) => [u, i]).sort((a, b) => a[0] - b[0]);
      const masked = noise.slice(0, Math.max(1, Math.round(values.rate / 100 * n))).map(([, i]) => i), at = masked[0];
      const xt = x0.map((id, i) => masked.includes(i) ? model.mask : id), [logp] = await logpAt(xt, [at]);
      if (isOld()) return;
      now = {x0, at, logp};
      typed.value = "";
      check.disabled = false;
      widget.view.replaceChildren(h("p", {className: "masked-line", "aria-label": "the masked sentence"},
        Array.from(text, (c, i) => i === at ? h("mark", {className: "target"}, "?") : masked.includes(i) ? h("i", {}, "█") : c)));
      widget.say(`Round ${values.round}: which character is at the mark?`);
    };
  },
});
