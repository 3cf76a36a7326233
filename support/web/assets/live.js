// The form above the viewer, of two pages: where a text is computed is `source`, of in_browser.js or of on_server.js.
//
//   source.read(typed, how)   what `ask` needs of a text; throws a sentence for the user if the text cannot be used
//   source.ask(id, how, read) begins to write; calls `receive` with what happens
//   source.stop(id)           ends what is being written
//   source.open()             called once; calls `receive` with {loaded, total}, then with {ready} or {error}
//   source.fields: the names of the fields that count
//   source.syntax, source.help: the gaps that can be typed, as [text, meaning], and what else is to be known
//
// What `receive` gets of a request: {tried}, how many texts the network has seen, and `seen`, the last; {given, tokens, steps}, the text before
// the first call, then {frame, calls, seconds} of each; {fills}, the likeliest, with {proven, bound, comparesLengths}, as
// from search.js; {parts}, the next of a text that is proofread, as from proofread.js; {done} or {error} at the end.
//
// While the model loads, a page of export.py plays the text that it recorded, samples[0], until the user begins something.
// A page without one writes the first example as soon as it is open.
const link = new URLSearchParams(location.hash.slice(1));
const phone = matchMedia("(max-width: 34rem)");
let ready = false, failed = false, request = 0, writing = null, last = "", refreshing = 0;  // refreshing: a timer, or 0
let wanted = null;  // what was asked for while the model loads
let replaying = 0;  // the timer that plays the recorded text once more, or 0

function say(text, isError = false) {
  $("said").textContent = text;
  $("said").classList.toggle("error", isError);
}

// Show how much of what takes long is done, in words and, if its total is known, as a bar.
function showProgress(words, done, total) {
  $("progress").hidden = false;
  $("counted").textContent = words;
  $("bar").hidden = !total;
  if (total) Object.assign($("bar"), {max: total, value: done});
}

const settingsOf = () => Object.fromEntries(source.fields.map(name => [name, $(name).value]));
const titleOf = typed => `${typed.slice(0, 16).replace(/\n/g, "↵") || "text"}, seed ${Number($("seed").value)}`;

function show(sample, first) {
  if (!samples[0]?.title) samples.shift();  // the page begins with an empty sample
  samples.push(sample);
  samples.splice(0, samples.length - first);
  display("film");
  $("controls").hidden = sample.frames.length === 1;  // of a ranked fill, whose calls are not recorded
  list();
  load(samples.length - 1);
}

// What is below the form: the "film" of a text, its "proof", or the "hint" of an empty page.
function display(what) {
  document.querySelector("main").dataset.shows = what;
  for (const [id, name] of [["text", "film"], ["proof", "proof"], ["hint", "hint"]]) $(id).hidden = what !== name;
  for (const part of document.querySelectorAll("footer, #samples")) part.hidden = what !== "film";
}

// Where the form hides what is below it.
function scrollToText() {
  if (phone.matches || innerHeight < 600) $("actions").scrollIntoView();
}

// Play the recorded text, and again while the model loads; without motion show its end.
function playRecorded() {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  display("film");
  if (still) return go(1e6);
  play(true);
  replaying = setInterval(() => { if (!timer && step === steps) play(true); }, 4000);
}

// The recorded text stays, at its end.
function endRecorded() {
  clearInterval(replaying);
  if (!samples[0]?.note || !replaying) return;
  replaying = 0;
  jump(1e6);
}

// End what is being written; what there is of it stays, if `isForgotten` or if nobody asked for it until the next text is
// shown.
function leave(isForgotten) {
  if (ready) $("progress").hidden = true;
  if (!writing) return;
  if (samples.at(-1) === writing) {
    Object.assign(writing, {planned: undefined, isForgotten: isForgotten || writing.isExample});
    refresh();
  }
  writing = null;
  $("stop").disabled = true;
}

// Write a text, "rank" the fills of one, or "fix" it.
function start(what = "write", isExample = false) {
  if (failed) return;  // what is said stays
  endRecorded();
  if (!ready) {
    wanted = what;
    return say("It begins when the model is loaded.");
  }
  const typed = $("typed").value, rank = what === "rank", fix = what === "fix";
  const said = JSON.stringify(settingsOf());
  if (what === "write" && said === last) $("seed").value = (Number($("seed").value) + 1) % 2 ** 32;  // another text
  const number = name => $(name).disabled ? null : Number($(name).value);
  const how = {rank, fix, ...Object.fromEntries(["tokens", "steps", "temperature", "seed"].map(n => [n, number(n)]))};
  try {
    if (fix && !typed.trim()) throw "There is no text to proofread; type one.";
    const read = source.read(typed, how);
    if (what === "write") last = JSON.stringify(settingsOf());
    if (!isExample) history.replaceState(null, "", "#" + new URLSearchParams({...Object.fromEntries(link), ...settingsOf()}));
    leave(what === "write");
    writing = {title: titleOf(typed), typed, what, isExample};
    $("stop").disabled = false;
    say({write: "waiting", rank: "searching for the likeliest fills", fix: "proofreading"}[what]);
    if (rank) showTried(typed);
    if (fix) openProof(typed);
    source.ask(++request, how, read);
  } catch (error) {
    say(String(error), true);
  }
}

function stop() {
  source.stop(++request);
  leave(false);
  say("stopped");
}

const isAsked = () => source.fields.some(name => link.has(name)) && $("locked").hidden;

function begun(what) {
  ready = true;
  $("facts").textContent = `${settings.model}, ${what}`;
  $("progress").hidden = true;
  endRecorded();
  say("");
  const asked = wanted ?? (isAsked() ? "write" : null), isEmpty = !samples[0].frames.length && $("locked").hidden;
  if (asked && $("composer").reportValidity()) start(asked);
  else if (isEmpty) start(live.examples.find(example => example.text)?.what, true);
}

// There is no model: say why.
function giveUp(sentence) {
  failed = true;
  $("progress").hidden = true;
  for (const button of document.querySelectorAll("#composer button")) button.disabled = true;
  say(sentence, true);
}

function receive(data) {
  if (data.ready) {
    begun(data.ready);
  } else if (data.total) {
    const {loaded, total} = data;
    showProgress(source.loading(data), loaded, total);
  } else if (data.error && !ready) {
    giveUp(data.error);
  } else if (data.id !== undefined && data.id !== request) {
    return;
  } else if (data.error) {
    leave(false);
    say(data.error, true);
  } else if (data.given) {  // the text before the first call
    Object.assign(writing, {given: data.given, tokens: data.tokens, frames: [], planned: data.steps, calls: 0, seconds: 0});
    say("");
    $("progress").hidden = true;  // of the lengths that were tried
    if (samples[0]?.share !== undefined) samples.length = 0;  // ranked fills, which this is none of
    if (samples.at(-1)?.isForgotten) samples.pop();
    show(writing, 9);
    scrollToText();
    go(0);
    play(true);
  } else if (data.frame) {
    writing.frames.push(data.frame);
    for (const [i, token] of data.frame) writing.tokens[i] = token;
    Object.assign(writing, {calls: data.calls, seconds: data.seconds});
    refreshing ||= setTimeout(refresh, 50);  // calls may arrive faster than a long text is drawn
  } else if (data.fills) {
    samples.length = 0;
    for (const fill of data.fills) {
      const sample = {...fill, calls: data.tried, seconds: data.seconds};
      const filled = sample.tokens.map((t, i) => sample.given[i] ? "\0" : t).join("").split(/\0+/).filter(Boolean).join("…");
      const p = data.comparesLengths ? sample.share : sample.p;
      show({...sample, title: `${exact(p)} ${filled.replaceAll("\n", "↵")}`}, data.fills.length);
    }
    writing = null;
    $("stop").disabled = true;
    $("progress").hidden = true;
    scrollToText();
    say(certificate(data));
    load(0);
    go(1e6);
  } else if (data.parts) {
    showParts(data.parts);
  } else if (data.done) {
    if (data.sample) Object.assign(writing, data.sample);
    if (writing.what === "fix") sayChanges();
    leave(false);
  } else if (data.tried !== undefined && writing && !writing.given) {
    showProgress(`${count(data.tried, "text")} seen`);
    if (data.seen && writing.what === "rank") showTried(data.seen);
  }
}

// While fills are ranked: the template, then what the network is shown.
function showTried(text) {
  $("hint").textContent = text;
  $("hint").className = "trying";
  display("hint");
}

const exact = p => `${Number((100 * p).toPrecision(2))}\u00a0%`;

// What is known of fills: the likeliest are shown, and no other has more than the bound. Of fills of several lengths it is
// in parts of their sum, as their shares are.
function certificate({fills: [best], proven, bound, comparesLengths}) {
  const what = comparesLengths ? "shares of their sum" : "their probability in this text";
  const most = comparesLengths ? best.share * Math.exp(bound - best.logp) : Math.exp(bound);
  const another = most < 1 ? `another may have up to ${exact(most)}` : "another may be likelier";
  const rest = proven ? `proven: any other has at most ${exact(most)}` : `not proven: ${another}`;
  return `The likeliest fills, with ${what}; ${bound < -1e299 ? "there are no others" : rest}.`;
}

// Update the text that is being written, if it is shown, and keep its tooltip open.
function refresh() {
  clearTimeout(refreshing);
  refreshing = 0;
  if (samples[which] !== writing) return;
  const open = cursor;
  load(which);
  point(open);
}

// ---- Proofreading: each change is a button that accepts or rejects it
function openProof(typed) {
  $("proof-text").replaceChildren(make("span", typed, "unread"));
  $("judge").hidden = true;
  display("proof");
  scrollToText();
}

// Show parts in place of the beginning of what is unread.
function showParts(parts) {
  const unread = $("proof-text").lastChild;
  for (const part of parts) {
    unread.before(part.change ? toButton(part) : part.before);
    unread.textContent = unread.textContent.slice(part.before.length);
    if (part.change) $("judge").hidden = false;
  }
}

function sayChanges() {
  const {length} = changesShown(), n = length === 1 ? "One change" : `${length} changes`;
  say(length ? `${n}: press one to reject or accept it, then use the text.` : "Nothing to change was found.");
}

function toButton({before, after, change: {kind, gain, pBefore, pAfter}}) {
  const button = make("button", "", "change"), visible = text => text.replaceAll("\n", "↵");
  button.append(make("del", visible(before)), make("ins", visible(after)));
  const p = (name, value) => value === null ? "" : `, ${name} ${percent(value)}`;
  const title = `${kind}: ${gain.toFixed(1)} nats likelier${p("before", pBefore)}${p("after", pAfter)}`;
  Object.assign(button, {type: "button", title});
  Object.assign(button.dataset, {before, after});
  button.setAttribute("aria-label", `${before || "nothing"} becomes ${after || "nothing"}`);
  button.addEventListener("click", () => accept(button, button.ariaPressed !== "true"));
  accept(button, true);
  return button;
}

const accept = (button, isAccepted) => { button.ariaPressed = String(isAccepted); };
const changesShown = () => [...document.querySelectorAll(".change")];
const proofText = () => [...$("proof-text").childNodes].map(node =>
  node.nodeName !== "BUTTON" ? node.textContent : node.dataset[node.ariaPressed === "true" ? "after" : "before"]).join("");

// ---- The form
// Replace the typed text so that the browser's undo brings it back.
function type(text) {
  $("typed").focus({preventScroll: true});
  $("typed").select();
  if (!document.execCommand("insertText", false, text)) $("typed").value = text;
  fit();
}

// Put a text at the cursor of the field.
function insert(text) {
  $("typed").focus({preventScroll: true});
  if (!document.execCommand("insertText", false, text)) $("typed").setRangeText(text);
  fit();
  endRecorded();
}

// Let the field be as high as its text, within bounds.
function fit() {
  const field = $("typed");
  field.rows = 2;
  while (field.scrollHeight > field.clientHeight && field.rows < (phone.matches ? 5 : 8)) field.rows++;
}

function addChip({label, text, what, tokens}) {
  const button = Object.assign(make("button", label), {type: "button"});
  button.addEventListener("click", () => {
    type(text);
    button.focus({preventScroll: true});
    if (tokens) $("tokens").value = tokens;
    if ($("composer").reportValidity()) start(what);
  });
  $("chips").append(button);
}

function begin() {
  $("facts").textContent = settings.model;
  live.examples.forEach(addChip);
  $("typed").value = live.examples.find(example => example.text)?.text ?? "";
  const {fills = true, fixes, key, steps, most_tokens} = live;
  for (const [text, meaning] of source.syntax) {
    const button = Object.assign(make("button", text), {type: "button"}), item = make("li");
    button.addEventListener("click", () => insert(text));
    item.append(button, meaning);
    $("syntax").append(item);
  }
  $("help").textContent = source.help;
  $("rank").hidden = !fills;
  $("proofread").hidden = !fixes;
  $("locked").hidden = !key;
  $("length").hidden = $("tokens").disabled = !most_tokens;
  if (most_tokens) Object.assign($("tokens"), {max: most_tokens, value: Math.min(200, most_tokens)});
  if (steps) Object.assign($("steps"), steps);
  $("calls-asked").hidden = $("steps").disabled = steps === null;
  for (const name of source.fields) if (link.has(name)) $(name).value = link.get(name);
  addEventListener("hashchange", () => location.reload());  // the user opened another link to this page
  for (const out of document.querySelectorAll("#settings output")) {
    const input = $(out.htmlFor), update = () => { out.value = input.value; };
    input.addEventListener("input", update);
    update();
  }
  fit();
  $("calls-name").textContent = source.callsName;
  const unfold = () => { $("more").open = !phone.matches; };  // on a phone the text would be out of sight below it
  phone.addEventListener("change", unfold);
  unfold();
  const isRecorded = samples[0].frames.length > 0;
  if (isRecorded && !isAsked()) {
    playRecorded();
  } else {
    samples[0] = {title: "", tokens: [], given: [], frames: [], calls: 0, seconds: 0};
    load(0);
    display("hint");
  }
  const isDone = e => e.key === "Enter" && (e.ctrlKey || e.metaKey);
  const press = (id, act) => $(id).addEventListener("click", act);
  $("typed").addEventListener("keydown", e => isDone(e) && $("composer").requestSubmit());
  $("typed").addEventListener("input", fit);
  $("composer").addEventListener("input", endRecorded);
  document.querySelector("footer").addEventListener("pointerdown", () => clearInterval(replaying));
  $("composer").addEventListener("submit", e => { e.preventDefault(); start(); });
  press("rank", () => { if ($("composer").reportValidity()) start("rank"); });
  press("proofread", () => { if ($("composer").reportValidity()) start("fix"); });
  press("stop", stop);
  press("accept", () => changesShown().forEach(button => accept(button, true)));
  press("reject", () => changesShown().forEach(button => accept(button, false)));
  press("use", () => { type(proofText()); say("The text is in the field."); });
  source.open();
}

begin();
