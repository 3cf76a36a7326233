// Where the page of serve.py computes: on its server, which sends what happens as server-sent events. served_page.py
// writes into `live` what the server can do.
const isGap = new RegExp(live.gap, "u");
let controller = null;

// The JSON of server-sent events.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
  }
}

// A sentence for the user of an error that the server sent, with its status if the answer had one.
function sentence({message, code}) {
  if (code === "queue_full") return "The server has too many requests to do; press the button again in a moment.";
  if (code === "stopping") return "The server is stopping; try again when it runs again.";
  if (code === "invalid_api_key")
    return $("key").value ? "The server does not take this key." : "This server needs a key; type it into the field.";
  return message[0].toUpperCase() + message.slice(1) + (message.endsWith(".") ? "" : ".");
}

// The parts of a text that was proofread, as from proofread.js.
function toParts(typed, changes) {
  const characters = Array.from(typed), parts = [];
  let at = 0;
  const keep = kept => kept && parts.push({before: kept, after: kept, change: null});
  for (const {position, before, after, kind, gain, p_before: pBefore, p_after: pAfter} of changes) {
    keep(characters.slice(at, position).join(""));
    parts.push({before, after, change: {kind, gain, pBefore, pAfter}});
    at = position + Array.from(before).length;
  }
  keep(characters.slice(at).join(""));
  return parts;
}

async function follow(id, body) {
  controller?.abort();
  const {signal} = controller = new AbortController();
  const headers = {"content-type": "application/json"};
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  let hasBegun = false, isDone = false;
  try {
    const response = await fetch("page", {method: "POST", headers, signal, body: JSON.stringify(body)});
    if (!response.ok) throw sentence((await response.json()).error);
    for await (const event of eventsOf(response)) {
      if (event.error) throw sentence(event.error);
      hasBegun = true;
      isDone = Boolean(event.done);
      if (event.changes) receive({id, parts: toParts(body.fix, event.changes)});
      receive({...event, comparesLengths: event.compares_lengths, id});
    }
    if (!isDone) throw "The server ended before the text was written; try again.";
  } catch (error) {
    if (signal.aborted) return;
    const gone = hasBegun ? "The connection to the server broke off; try again."
      : "The server does not answer; check that serve.py runs and that there is a network, then try again.";
    receive({id, error: typeof error === "string" ? error : gone});
  }
}

const source = {
  fields: ["typed", "tokens", "steps", "temperature", "seed"],
  syntax: [
    ...live.fills ? [[live.signs[0], "one token"], ["[___]", "a gap of any length"]] : [],
    ...live.fills && live.matches ? [["[___:[a-z]+]", "a gap that must match a pattern"], ["[___|yes|now]", "one of a list"]] : [],
  ],
  help: live.fills ? "A text without gaps is continued." : "The text is continued.",
  read(typed, how) {
    const hasGap = live.fills && isGap.test(typed);
    if (how.rank && !hasGap) throw `There is no gap to rank fills for: type ${live.signs[0]} for a token, or [___].`;
    if (how.fix) return {fix: typed};
    return hasGap ? {infill: typed, rank: how.rank} : {prompt: typed, max_tokens: how.tokens};
  },
  ask(id, {seed, steps, temperature}, text) {
    if (text.fix !== undefined) return follow(id, text);
    // A model of blocks, which takes 8 calls for each by default, fills gaps as one without: in 32.
    if (text.infill !== undefined && live.blocks > 1) steps = Math.ceil(4 * steps / live.blocks);
    follow(id, {...text, seed, steps: steps ?? undefined, temperature});
  },
  callsName: "calls",  // for each context of a long text
  stop() {
    controller?.abort();
  },
  open() {
    receive({ready: `on the server's ${live.device}`});
  },
};
