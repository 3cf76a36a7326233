// Lessons 9 and 13: the search for the likeliest fills as a tree, and what it proves.
import {addUp, define, encode, exact, h, model, predict, visible} from "./common.js";
import {search} from "../../support/web/assets/search.js";

define("search-tree", {
  title: "The search as a tree",
  about: "Type a text with a gap of a few _. Each box is a partial fill that the network has seen, in the order of the calls; " +
    "under it are those that came from it. The likeliest fills light up, and the bound says what any other has at most.",
  fields: {text: "My lord, I pray you, s__ to the king", top: 3},
  needsModel: true,
  build(widget) {
    const {values} = widget;
    widget.text("text", "text", {maxLength: 60});
    widget.range("top", "fills", 1, 5);
    return async isOld => {
      const x = encode(values.text, "_█"), gaps = [...x.keys()].filter(i => x[i] === model.mask);
      if (!gaps.length) throw "Type _ for a missing character.";
      if (gaps.length > 6) throw "Six masks at most: the tree of more is too large to draw.";
      const segments = [];
      for (const [i, id] of x.entries()) {
        const last = segments.at(-1), isMask = id === model.mask;
        if (isMask && last?.length) last.length++;
        else if (!isMask && last?.ids) last.ids.push(id);
        else segments.push(isMask ? {length: 1} : {ids: [id]});
      }
      const seen = [];  // the partial fills, as ids of the gaps, in the order of the calls
      const look = async rows => {
        if (isOld()) throw null;
        seen.push(...rows.map(row => gaps.map(i => row[i])));
        widget.say(`The network has seen ${seen.length} text${seen.length === 1 ? "" : "s"}.`);
        return predict(rows);
      };
      const {fills, proven, bound} = await search(look, segments, values.top, model);
      if (isOld()) return;
      const open = fill => fill.filter(id => id === model.mask).length;
      const holds = (fill, part) => part.every((id, k) => id === model.mask || id === fill[k]);
      const nodes = [...seen.map((fill, k) => ({fill, call: k + 1})),
        ...fills.map(({ids, p}) => ({fill: gaps.map(i => ids[i]), p}))];
      const children = new Map(nodes.map(node => [node, []]));
      const [root] = nodes;
      for (const node of nodes.slice(1)) {  // below the fill that it completes by least
        const above = nodes.filter(one => one.p === undefined && open(one.fill) > open(node.fill) && holds(node.fill, one.fill));
        children.get(above.sort((a, b) => open(a.fill) - open(b.fill) || b.call - a.call)[0] ?? root).push(node);
      }
      const text = fill => fill.map(id => id === model.mask ? h("i", {}, "█") : visible(model.vocab[id]));
      const draw = node => h("li", {className: node.p !== undefined ? "found" : ""},
        h("span", {className: "node"}, h("code", {}, text(node.fill)), h("small", {}, node.p !== undefined ? exact(node.p) : `call ${node.call}`)),
        children.get(node).length ? h("ul", {}, children.get(node).map(draw)) : null);
      widget.view.replaceChildren(h("ul", {className: "tree"}, draw(root)));
      Object.assign(widget.view.dataset, {proven, bound, fills: JSON.stringify(fills.map(({logp}) => logp))});
      const rest = proven ? `Proven: any other fill has at most ${exact(Math.exp(bound))}.` : `Not proven: another may have ${exact(Math.exp(bound))}.`;
      const all = 65 ** gaps.length;
      widget.say(`${rest} The network read ${seen.length} sequences, where ${all.toLocaleString("en")} fills are possible; those listed have ` +
        `${exact(addUp(fills.map(({p}) => p)))} together.`);
    };
  },
});
