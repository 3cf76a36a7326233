// Lesson 11: which position sees which other one, while a text is written or learned.
import {define, h} from "./common.js";

const KINDS = {diffusion: "diffusion, no blocks", gpt: "GPT", writing: "blocks, writing", training: "blocks, training"};

// Whether row i sees column j. Of `training` there are 2 T rows: the masked text, then the clean one.
export function sees(kind, T, S, i, j) {
  const block = at => Math.floor(at % T / S), [isClean, seesClean] = [i >= T, j >= T];
  if (kind === "diffusion") return true;
  if (kind === "gpt") return j <= i;
  if (kind === "writing" || isClean && seesClean) return block(j) <= block(i);
  return !isClean && (seesClean ? block(j) < block(i) : block(j) === block(i));
}

define("who-sees-whom", {
  title: "Who sees whom",
  about: "A row of the table is a position that the network computes, a column one that it may look at. Press a row, or walk " +
    "through the rows with the slider.",
  fields: {kind: "training", tokens: 6, block: 2, row: 3},
  build(widget) {
    const {values} = widget;
    widget.choice("kind", "model", KINDS);
    widget.range("tokens", "tokens", 2, 12);
    widget.range("block", "block", 1, 12);
    const slider = widget.range("row", "row", 1, 24);
    return () => {
      const {kind, tokens: T} = values, S = Math.min(values.block, T), n = kind === "training" ? 2 * T : T;
      const isBlocks = kind === "writing" || kind === "training", row = Math.min(values.row, n) - 1;
      slider.max = n;
      const name = at => {
        const text = kind !== "training" ? "position" : at < T ? "masked" : "clean";
        return `${text} ${at % T + 1}`;
      };
      const edge = at => [at % S === 0 && isBlocks ? "edge" : "", at === T ? "half" : ""].join(" ");
      const choose = i => { slider.value = i + 1; slider.dispatchEvent(new Event("input")); };
      const all = Array.from({length: n}, (_, i) => i);
      widget.view.replaceChildren(h("table", {className: "sees"},
        h("tr", {}, h("th"), all.map(j => h("th", {scope: "col", className: edge(j), title: name(j)}, String(j % T + 1)))),
        all.map(i => h("tr", {className: i === row ? "here" : "", onclick: () => choose(i)},
          h("th", {scope: "row"}, name(i)),
          all.map(j => {
            const is = sees(kind, T, S, i, j);
            return h("td", {className: `${is ? "yes" : ""} ${edge(j)}`, "aria-label": is ? "sees" : "does not see"});
          })))));
      const seen = all.filter(j => sees(kind, T, S, row, j)), where = seen.map(name).join(", ");
      widget.view.dataset.seen = JSON.stringify(seen);
      const cost = {diffusion: `Each call computes all ${n} rows again.`, gpt: "The rows above are kept: a call computes one new row.",
        writing: `Finished blocks are kept: a call computes the ${S} rows of its block.`,
        training: "Both texts are read at once, so that one step trains all blocks."}[kind];
      widget.say(`Row “${name(row)}” sees ${seen.length} of ${n}: ${where}. ${cost}`);
    };
  },
});
