// The form above the viewer, of two pages: where a text is computed is `source`, of in_browser.js or of on_server.js.
//
//   source.read(typed, how)   what `ask` needs of a text; throws a sentence for the user if the text cannot be used
//   source.ask(id, how, read) begins to write; calls `receive` with what happens
//   source.stop(id)           ends what is being written
//   source.open()             called once; calls `receive` with {ready}
//   source.fields, source.help: the names of the fields that count, and how to type gaps
//
// What `receive` gets of a request: {tried}, how many texts the network has seen; {given, tokens, steps}, the text before
// the first call, then {frame, calls, seconds} of each; {fills}, ranked; {parts}, the next of a text that is proofread, as
// from proofread.js; {done} or {error} at the end.
const link = new URLSearchParams(location.hash.slice(1));
let ready = false, request = 0, writing = null, last = "", refreshing = 0;  // refreshing: a timer, or 0

function say(text, isError = false) {
  $("said").textContent = text;
  $("said").classList.toggle("error", isError);
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
  if (what !== "hint" && (innerWidth < 544 || innerHeight < 600)) $("actions").scrollIntoView();  // the form hides it
}

// End what is being written; what there is of it stays, if `isForgotten` until the next text is shown.
function leave(isForgotten) {
  if (!writing) return;
  if (samples.at(-1) === writing) {
    Object.assign(writing, {steps: writing.frames.length, isForgotten});
    refresh();
  }
  writing = null;
  $("stop").disabled = true;
}

// Write a text, "rank" the fills of one, or "fix" it.
function start(what = "write") {
  const typed = $("typed").value, rank = what === "rank", fix = what === "fix";
  const said = JSON.stringify(settingsOf());
  if (what === "write" && said === last) $("seed").value = (Number($("seed").value) + 1) % 2 ** 32;  // another text
  const number = name => $(name).disabled ? null : Number($(name).value);
  const how = {rank, fix, ...Object.fromEntries(["tokens", "steps", "temperature", "seed"].map(n => [n, number(n)]))};
  try {
    if (fix && !typed.trim()) throw "There is no text to proofread; type one.";
    const read = source.read(typed, how);
    if (what === "write") last = JSON.stringify(settingsOf());
    history.replaceState(null, "", "#" + new URLSearchParams({...Object.fromEntries(link), ...settingsOf()}));
    leave(what === "write");
    writing = {title: titleOf(typed), typed, what};
    $("stop").disabled = false;
    say({write: "waiting", rank: "trying fills", fix: "proofreading"}[what]);
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

function receive(data) {
  if (data.ready) {
    ready = true;
    $("facts").textContent = `${settings.model}, ${data.ready}`;
    say("");
    for (const button of document.querySelectorAll("#write, #rank, #proofread, #chips button")) button.disabled = false;
    const isAsked = source.fields.some(name => link.has(name)) && $("locked").hidden;
    if (isAsked && $("composer").reportValidity()) start();
  } else if (data.total) {
    say(source.loading(data));
  } else if (data.id !== undefined && data.id !== request) {
    return;
  } else if (data.error) {
    leave(false);
    say(data.error, true);
  } else if (data.given) {  // the text before the first call
    Object.assign(writing, {given: data.given, tokens: data.tokens, frames: [], steps: data.steps, calls: 0, seconds: 0});
    say("");
    if (samples[0]?.share !== undefined) samples.length = 0;  // ranked fills, which this is none of
    if (samples.at(-1)?.isForgotten) samples.pop();
    show(writing, 9);
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
      show({...sample, title: `${percent(sample.share)} ${filled.replaceAll("\n", "↵")}`}, data.fills.length);
    }
    writing = null;
    $("stop").disabled = true;
    say("The likeliest of many fills, by the probability of the text from the first gap on.");
    load(0);
    go(1e6);
  } else if (data.parts) {
    if (!writing.isProof) openProof(writing.typed);
    writing.isProof = true;
    showParts(data.parts);
  } else if (data.done) {
    if (data.sample) Object.assign(writing, data.sample);
    if (writing.what === "fix") sayChanges();
    leave(false);
  } else if (data.tried && writing && !writing.given) {
    say(`${writing.what === "fix" ? "proofreading" : "trying fills"}: ${data.tried} texts shown to the network`);
  }
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
}

function addChip({label, text, what, tokens}) {
  const button = make("button", label);
  Object.assign(button, {type: "button", disabled: true});
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
  $("typed").value = live.examples[0]?.text ?? "";
  const {fills = true, fixes, key, steps, most_tokens} = live;
  $("help").textContent = source.help + (fixes ? " Proofread finds mistakes in a text without gaps." : "");
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
  for (const button of document.querySelectorAll("#write, #rank, #proofread")) button.disabled = true;
  display("hint");
  const isDone = e => e.key === "Enter" && (e.ctrlKey || e.metaKey);
  const press = (id, act) => $(id).addEventListener("click", act);
  $("typed").addEventListener("keydown", e => isDone(e) && $("composer").requestSubmit());
  $("composer").addEventListener("submit", e => { e.preventDefault(); if (ready) start(); });
  press("rank", () => { if ($("composer").reportValidity()) start("rank"); });
  press("proofread", () => { if ($("composer").reportValidity()) start("fix"); });
  press("stop", stop);
  press("accept", () => changesShown().forEach(button => accept(button, true)));
  press("reject", () => changesShown().forEach(button => accept(button, false)));
  press("use", () => { type(proofText()); say("The text is in the field."); });
  source.open();
}

begin();
