"use strict";
// The page of `emend serve`. Text of models, packs and files goes into the document as text, never as markup.
const $ = (id) => document.getElementById(id);
let token = sessionStorage.getItem("token") || "", lost = false, base = "", editors = [], answering = null, shown = null;
const turns = [];

function make(name, options = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(options))
    if (key in element) element[key] = value; else element.setAttribute(key, value);
  element.append(...children);
  return element;
}
const percent = (p) => (100 * p).toFixed(p < 0.001 || p > 0.999 ? 2 : 1) + " %";
const whole = (v) => (v > 0 && v < 0.5) || (v >= 99.5 && v < 100) ? Math.min(99.99, Math.max(0.01, v)).toFixed(2) : v.toFixed(0);
const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

// ---- the server
function reachable(yes) {
  if (yes === !lost) return;
  lost = !yes;
  $("lost").hidden = yes;
  $("state").textContent = yes ? "connected" : "lost";
  if (yes) refresh();
}
async function call(path, body, method = body ? "POST" : "GET", signal) {
  const headers = token ? {Authorization: "Bearer " + token} : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {method, headers, signal, body: body && JSON.stringify(body)});
  } catch (error) {
    if (error.name !== "AbortError") reachable(false);
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  }
  reachable(true);
  if (response.status === 401) $("ask-token").hidden = false;
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try { message = JSON.parse(text).error.message; } catch { /* not from emend */ }
    throw Object.assign(new Error(message), {status: response.status});
  }
  return response;
}
const get = async (path, body, method) => (await call(path, body, method)).json();
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    let step;
    try { step = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      reachable(false);
      throw new Error("the server does not answer");  // browsers word it each in their way
    }
    if (step.done) return;
    const parts = (held + step.value).split("\n\n");
    held = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}
async function hello() {
  try {
    const health = await get("healthz");
    if (!lost) $("state").textContent = "connected";
    if (!health.model) return;  // without the token
    base = health.model;
    editors = health.editors;
    $("model").textContent = base;
    if (shown !== null && shown !== health.packs.join()) showPacks(await get("v1/packs"));
  } catch { /* the banner says it */ }
}
async function refresh() {
  shown = null;
  await hello();
  try { showPacks(await get("v1/packs")); } catch (error) { $("packs").replaceChildren(make("li", {className: error.status === 401 ? "soft" : "bad"}, error.status === 401 ? "Shown with the token." : error.message)); }
}
async function start() {
  await refresh();
  try {
    for (const job of (await get("v1/edits")).data)
      if (job.status === "queued" || job.status === "running") watch(job, $("jobs"));
  } catch { /* the list of packs says it */ }
}
// Kept only if it is the right one.
$("ask-token").onsubmit = async (event) => {
  event.preventDefault();
  const form = $("ask-token"), before = token, given = form.token.value.trim();
  $("token-note").textContent = "";
  try {
    if (!/^[\x20-\x7e]+$/.test(given)) throw new Error("A token has letters, digits and signs of ASCII only.");
    token = given;
    await get("v1/packs");
  } catch (error) {
    token = before;
    $("token-note").textContent = error.status === 401 ? "wrong token" : error.message;
    return;
  }
  sessionStorage.setItem("token", token);
  form.hidden = true;
  $("message").focus();
  start();
};
setInterval(hello, 3000);

// ---- tabs
const tabs = [...$("tabs").children];
function choose(tab, what) {
  for (const one of tabs) {
    const on = one === tab;
    one.setAttribute("aria-selected", on);
    one.tabIndex = on ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !on;
  }
  if (tab.id === "tab-report") listReports(what);
}
for (const tab of tabs) {
  tab.onclick = () => choose(tab);
  tab.onkeydown = (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  };
}

// ---- chat
function bubble(role, text) {
  const element = make("div", {className: "said " + role}, text);
  $("nothing")?.remove();
  $("chat").append(element);
  $("chat").scrollTop = $("chat").scrollHeight;
  return element;
}
async function answer() {
  const element = bubble("assistant", "…"), mine = answering = new AbortController();
  const place = turns.length, question = turns[place - 1].content, messages = turns.slice();
  $("halt").disabled = false;
  $("chat").setAttribute("aria-busy", "true");  // read out when it is whole
  let text = "", failure = null;
  try {
    const response = await call("v1/chat/completions",
      {messages, stream: true, temperature: Number($("temperature").value)}, "POST", mine.signal);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      text += event.choices[0]?.delta?.content || "";
      element.textContent = text || "…";
      $("chat").scrollTop = $("chat").scrollHeight;
    }
  } catch (error) { failure = error; }
  if (answering === mine) answering = null;
  $("halt").disabled = !answering;
  $("chat").setAttribute("aria-busy", String(!!answering));
  if (!element.isConnected) return;  // taken away meanwhile
  const said = failure && failure.name !== "AbortError" ? make("p", {className: "bad"}, failure.message) : "";
  if (failure && !text) {  // the message goes back
    turns.pop();
    [...$("chat").querySelectorAll(".said.user")].pop()?.remove();
    $("message").value = [question, $("message").value].filter(Boolean).join("\n");
    element.replaceWith(said);
    $("chat").scrollTop = $("chat").scrollHeight;
    return;
  }
  if (!text) element.textContent = "(the model said nothing)";
  element.append(said);
  turns.push({role: "assistant", content: text});
  const fix = make("button", {type: "button"}, "This should say …");
  fix.onclick = () => {
    element.classList.add("wrong");
    const form = correction(question, text, place);
    form.never.onclick = () => { form.replaceWith(fix); element.classList.remove("wrong"); fix.focus(); };
    fix.replaceWith(form);
  };
  element.after(fix);
  $("chat").scrollTop = $("chat").scrollHeight;
}
$("say").onsubmit = (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || answering) return;
  $("message").value = "";
  $("chat").querySelectorAll(":scope > p.bad").forEach((one) => one.remove());
  turns.push({role: "user", content: text});
  bubble("user", text);
  answer();
};
$("message").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("say").requestSubmit();
};
$("halt").onclick = () => answering?.abort();
$("fresh").onclick = () => { answering?.abort(); turns.length = 0; $("chat").replaceChildren(); $("message").focus(); };

// ---- correcting an answer
// A statement that ends where the answer begins, and what it is about: a proposal that the user can change.
function propose(question, text) {
  const sentence = text.split(/(?<!\b(?:Dr|Mr|Mrs|Ms|St|\p{Lu})\.)(?<=[.!?])\s|\n/u)[0].split(/, (?:which|who|where)\b/)[0].replace(/[.!?]+\s*$/, "");
  const names = (from) => (from.match(/(?:\b(?:The|the) )?\p{Lu}[\p{L}\d'’-]*(?: (?:(?:of|the|de|von) )?\p{Lu}[\p{L}\d'’-]*)*/gu) || []).filter((name) => !/^(?:The|An?|It)$/.test(name));
  const asked = names(question.replace(/^\W*\p{L}+/u, (word) => word.toLowerCase()));
  const said = (name) => { const at = sentence.toLowerCase().indexOf(name.toLowerCase()); return at < 0 ? "" : sentence.slice(at, at + name.length); };
  const subject = asked.map(said).sort((a, b) => b.length - a.length)[0] || asked[0] || names(sentence)[0] || "";
  if (!sentence.includes(subject)) return {prompt: "", subject};
  const after = sentence.indexOf(subject) + subject.length;
  const verbs = [...sentence.matchAll(/\b(?:is|are|was|were|in|of|by|called|named|speaks?|plays?|wrote)\b/g)].filter((verb) => verb.index >= after);
  const verb = verbs[verbs.length - 1];
  let prompt = verb ? sentence.slice(0, verb.index + verb[0].length) : subject + " is";
  if (subject) prompt = prompt.replace(subject, "{}");
  return {prompt, subject};
}
function correction(question, text, place) {
  const {prompt, subject} = propose(question, text);
  const field = (label, name, value, extra = {}) => make("label", {}, label + " ", make("input", {name, value, required: true, ...extra}));
  const editor = make("select", {name: "editor"}, make("option", {value: ""}, "the usual"), ...editors.map((name) => make("option", {value: name}, name)));
  const form = make("form", {className: "fix"},
    field("Statement; {} is the place of the subject", "prompt", prompt), field("Subject", "subject", subject),
    field("should say", "target", "", {placeholder: "Lyon"}),
    make("div", {className: "row"}, make("label", {}, "Method ", editor), make("button", {className: "main"}, "Write it"), make("button", {type: "button", name: "never"}, "Leave it")));
  form.onsubmit = async (event) => {
    event.preventDefault();
    const fact = {prompt: form.prompt.value, subject: form.subject.value, target_new: form.target.value.trim()};
    if (!fact.prompt.includes("{}")) fact.prompt = fact.prompt.replace(fact.subject, "{}");
    const where = make("div");
    form.hidden = true;  // what was typed comes back if nothing is written
    form.after(where);
    const written = await edit({facts: [fact], ...(editor.value && {editor: editor.value})}, where, async () => {
      const full = fact.prompt.replace("{}", () => fact.subject), inside = full.replace(/^The /, "the ");
      $("compare").prompt.value = full;
      $("compare").target.value = fact.target_new;
      $("compare").more.value = `paraphrase: Everybody knows that ${inside}\nparaphrase: Question: ${question} Answer:\nnegation: It is not true that ${inside}`;
      form.remove();
      if (where.isConnected && turns.length >= place) {  // what was said after it is not said any more
        answering?.abort();
        while (where.nextSibling) where.nextSibling.remove();
        turns.length = place;
        await answer();
      }
      await compare();
    });
    if (written) form.remove(); else { form.hidden = false; form.target.focus(); }
  };
  setTimeout(() => form.target.focus());
  return form;
}

// ---- jobs
const found = (text, name) => Number((new RegExp(name + " (-?[\\d.]+)").exec(text) || [])[1]);
// Loss, and dashed the probability of the new answer, step by step.
function curves(seen) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), last = seen[seen.length - 1];
  svg.setAttribute("viewBox", "0 0 100 50");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const [key, most] of [["loss", Math.max(...seen.map((one) => one.loss), 1e-9)], ["probability", 1]]) {
    const path = document.createElementNS(svg.namespaceURI, "path");
    path.setAttribute("d", seen.map((one, i) => `${i ? "L" : "M"}${100 * i / Math.max(1, seen.length - 1)} ${48 - 46 * one[key] / most}`).join(""));
    svg.append(path);
  }
  return [svg, make("p", {className: "soft"}, make("span", {className: "bad"}, `loss ${seen[0].loss.toFixed(2)} → ${last.loss.toFixed(2)}`), ", ",
    make("span", {className: "good"}, `- - probability ${percent(seen[0].probability)} → ${percent(last.probability)}`))];
}
// Figures before and after, green where the edit does what it should and red where it does damage.
const FIGURES = {edit_begins: ["says the new answer", 0], paraphrase_begins: ["… after paraphrases", 0], question_begins: ["… to a question", 0], prefixed_begins: ["… after other text", 0],
  negation_begins: ["… after a negation", -1], neighborhood_first_token_kept: ["neighbours: first token kept", 1], neighborhood_ten_tokens_kept: ["neighbours: ten tokens kept", 1],
  loops: ["repeats itself", -1], entropy: ["variety of words, bits", null], neighborhood_kl: ["neighbours moved, nats a token", -1], neutral_kl: ["other text moved, nats a token", -1]};
function figures(metrics) {
  const rows = [], health = Object.keys(metrics?.health?.post || {}).map((name) => [name, [name, 1]]);
  for (const [name, [label, way]] of [...Object.entries(FIGURES), ...health]) {
    const {pre = {}, post = {}} = (name in FIGURES ? metrics?.free : metrics?.health) || {}, after = post[name];
    if (typeof after !== "number") continue;
    const moved = name.endsWith("_kl"), before = pre[name] ?? (moved ? 0 : name.endsWith("_kept") ? 100 : undefined);
    const worse = moved ? after > 0.05 : way === 0 ? after < 50 : way * (before - after) > 0;
    const show = (v) => v === undefined ? "" : moved || name === "entropy" ? v.toFixed(3) : name in FIGURES ? whole(v) + " %" : v.toFixed(0);
    rows.push(make("tr", {}, make("th", {scope: "row"}, label), make("td", {}, show(before)), way === null ? make("td", {}, show(after)) : make("td", {className: worse ? "bad" : "good"}, show(after) + (worse ? " ✗" : " ✓"))));
  }
  return rows.length ? make("table", {className: "figures"}, make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "measured over the edit’s facts"), make("th", {scope: "col"}, "before"), make("th", {scope: "col"}, "after"))),
    make("tbody", {}, ...rows)) : "";
}
// The packs in force that cannot be together with this one: a model of both is refused.
async function opponents(pack) {
  const others = [];
  for (const other of (await get("v1/packs")).active)
    if (other !== pack) await get(`v1/models/${base}+${other}+${pack}`).catch((error) => { if (error.status === 400) others.push(other); });
  return others;
}
// A pack that is kept, but not in force, with a button that puts it there instead of the others.
async function instead(pack, notice, line, then) {
  const others = await opponents(pack), note = make("p", {className: "bad", role: "alert"}, others.length ? "" : "Switch packs under Edits to put it in force.");
  const why = make("p", {className: "soft"}, notice);
  line.after(note, why);
  line.scrollIntoView({block: "nearest"});
  if (!others.length) return;
  const button = make("button", {type: "button"}, `Switch ${others.join(", ")} off and ${pack} on`);
  button.onclick = async () => {
    button.disabled = true;
    try {
      for (const other of others) await get("v1/packs/" + other, {active: false}, "PATCH");
      await get("v1/packs/" + pack, {active: true}, "PATCH");
      for (const past of [button, why, line]) past.remove();
      note.className = "good";
      note.textContent = `${pack} is in force now.`;
      then?.();
    } catch (error) {
      button.disabled = false;
      note.textContent = error.message;
    }
    refresh();
  };
  line.after(button);
}
const edit = (request, where, then) => watch(get("v1/edits", request), where, then);
// Shows a job to its end; `then` comes when its pack is in force. Whether there is a pack.
async function watch(asked, where, then) {
  let written = false;
  const bar = make("progress", {max: 1, value: 0, "aria-label": "Progress of the edit"}), line = make("p", {className: "soft"}, "waiting …");
  const stop = make("button", {type: "button"}, "Cancel"), drawing = make("div"), box = make("div", {className: "job"}, bar, line, drawing, stop), seen = [];
  where.append(box);
  try {
    const {id, pack} = await asked;
    line.textContent = pack + ": waiting …";
    stop.onclick = () => get("v1/edits/" + id, undefined, "DELETE").catch((error) => { line.textContent = error.message; });
    let job = null;
    for (let tries = 0; !job && tries < 200; ++tries) {
      if (tries) await new Promise((resolve) => setTimeout(resolve, 1000));
      seen.length = 0;  // every try tells all from the beginning
      for (const told of [...box.querySelectorAll("p.bad")]) if (told !== line) told.remove();
      try {
        for await (const event of events(await call(`v1/edits/${id}/events`))) {
          if (event.event === "end") { job = event.job; break; }
          if (event.progress) bar.value = event.progress;
          if (event.event === "targets.fact" && typeof event.fields?.loss === "number") line.textContent = `loss ${event.fields.loss.toFixed(3)}, probability ${percent(event.fields.probability)} after ${event.fields.steps} steps`;
          else if (event.level === "warning") box.append(make("p", {className: "bad"}, event.text));
          else if (event.event === "progress") line.textContent = [event.phase, event.text].filter(Boolean).join(": ");
          const loss = found(event.text, "loss"), probability = found(event.text, "probability");
          if (loss >= 0 && probability >= 0) { seen.push({loss, probability}); if (seen.length > 1) drawing.replaceChildren(...curves(seen)); }
        }
      } catch (error) {
        if (error.message !== "the server does not answer") throw error;
      }
    }
    if (!job) throw new Error("the server does not answer");
    bar.value = 1;
    stop.remove();
    const edits = job.edits || {}, done = job.status === "done";
    line.className = done && !edits.not_said && !job.notice ? "good" : "bad";
    line.textContent = done ? `${pack}: ${edits.said ?? "?"} of ${job.facts} said by the model ${job.notice ? "while it was tried. It is kept, but not in force: the model answers as before." : "now"}`
      : job.status === "running" || job.status === "queued" ? `${pack}: the server was stopped; the edit was not finished`
      : `${job.status}${job.error ? ": " + job.error : "; every byte is as it was"}`;
    written = done;
    if (done) {
      const report = make("button", {type: "button"}, "Report");
      report.onclick = () => { choose($("tab-report"), id); $("tab-report").focus(); };
      if (where.id === "facts-jobs") box.append(figures(job.metrics)); else $("measured").replaceChildren(figures(job.metrics));
      box.append(report);
    }
    await refresh();
    if (job.notice) await instead(pack, job.notice, line, then);
    else if (done) then?.();
  } catch (error) {
    line.className = "bad";
    line.textContent = error.message;
    stop.remove();
  }
  return written;
}

// ---- before and after
// As whole words: "Romeo" does not begin with "Rome".
const plain = (text) => text.toLowerCase().replace(/^[^\p{L}\p{N}]+/u, "").replace(/^(?:the|an?) /, "").trim();
const begins = (text, answer) => plain(text).startsWith(plain(answer)) && !/^[\p{L}\p{N}]/u.test(plain(text).slice(plain(answer).length));
async function compare() {
  const form = $("compare"), target = form.target.value.trim(), prompts = [{kind: "fact", prompt: form.prompt.value}];
  for (const line of form.more.value.split("\n")) {
    const [, kind, prompt] = /^\s*(?:(paraphrase|negation|neighbour)\s*:)?\s*(.*\S)/.exec(line) || [];
    if (prompt) prompts.push({kind: kind || "neighbour", prompt});
  }
  $("compared").replaceChildren(make("p", {className: "soft"}, "asking …"));
  try {
    const {results} = await get("v1/probe", {prompts: prompts.map(({prompt}) => ({prompt, targets: target ? [target] : []}))});
    $("compared").replaceChildren(...results.map((one, i) => {
      const {kind} = prompts[i], p = (side) => side.targets[0]?.probability, same = one.before.text === one.after.text;
      const follows = kind === "fact" || kind === "paraphrase";
      const denied = kind === "negation" && target, says = target && (p(one.after) > 0.5 || begins(one.after.text, target));
      const good = follows ? (target ? says : !same) : denied ? !says : same;
      const verdict = follows ? (good ? "follows the edit" : "does not follow the edit") : denied && !(good && same)
        ? (good ? "does not say the new answer" : "says the new answer") : good ? "left alone" : "changed by the edit";
      const side = (name, what, mark) => make("div", {className: mark}, make("span", {className: "soft"}, name), make("span", {}, what.text || "(the text ends here)"), make("i", {}, target ? percent(p(what)) : ""));
      return make("div", {className: "pair"}, make("p", {}, make("b", {}, kind + ": "), make("bdi", {}, one.prompt)),
        side("before", one.before, ""), side("after", one.after, good ? "good" : "bad"),
        make("p", {className: "soft"}, (good ? "✓ " : "✗ ") + verdict));
    }));
  } catch (error) { $("compared").replaceChildren(make("p", {className: "bad"}, error.message)); }
}
$("compare").onsubmit = (event) => { event.preventDefault(); compare(); };

// ---- packs
async function save(path, name) {
  const url = URL.createObjectURL(await (await call(path)).blob());
  make("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
function showPacks({data, active}) {
  const order = [...active, ...data.map((pack) => pack.name).filter((name) => !active.includes(name))];
  const held = document.activeElement?.closest("#packs > li"), controls = (item) => [...item.querySelectorAll("input, button, select")];
  const which = held && controls(held).indexOf(document.activeElement);
  shown = active.join();
  $("packs").replaceChildren(...!data.length ? [make("li", {className: "soft"}, "None yet.")] : order.map((name) => {
    const pack = data.find((one) => one.name === name), note = make("p", {className: "bad", role: "alert"});
    const act = (path, body, method) => get(path, body, method).catch((error) => { note.textContent = error.message; throw error; }).then(refresh, () => {});
    const on = make("input", {type: "checkbox", role: "switch", checked: pack.active});
    on.onchange = () => call("v1/packs/" + name, {active: on.checked}, "PATCH").then(refresh, (error) => { on.checked = pack.active; note.textContent = error.message; });
    const undo = make("button", {type: "button", "aria-label": (pack.active ? "Undo " : "Delete ") + name}, pack.active ? "Undo" : "Delete");
    undo.onclick = () => { if (confirm(`Take ${name} back for good? Download it first to keep it.`)) act("v1/packs/" + name, undefined, "DELETE"); };
    const up = make("button", {type: "button", "aria-label": `Apply ${name} earlier`, disabled: !pack.position}, "↑");
    up.onclick = () => act("v1/packs/" + name, {active: true, position: pack.position - 1}, "PATCH");
    const form = make("select", {"aria-label": "Download " + name}, make("option", {value: ""}, "Download …"),
      ...Object.entries(!pack.beside ? {pack: "edit pack", peft: "PEFT (tar)", lora: "LoRA, GGUF", gguf: "merged GGUF"} : {pack: "edit pack"}).map(([value, text]) => make("option", {value}, text)));
    const end = {pack: ".safetensors", peft: ".tar", lora: ".lora.gguf", gguf: ".gguf"};
    form.onchange = () => { const as = form.value; form.value = ""; if (as) save(`v1/packs/${name}/file?as=${as}`, name + end[as]).catch((error) => { note.textContent = error.message; }); };
    const facts = pack.facts.slice(0, 3).map((fact) => make("p", {className: "soft"}, make("bdi", {}, fact.prompt.replace("{}", () => fact.subject)), " → ", make("bdi", {}, fact.target_new)));
    if (pack.facts.length > 3) facts.push(make("p", {className: "soft"}, `and ${pack.facts.length - 3} more`));
    if (pack.strength !== null) {
      const value = make("output", {}, pack.strength.toFixed(2));
      const slider = make("input", {type: "range", min: Math.min(-2, pack.strength), max: Math.max(2, pack.strength), step: 0.05, value: pack.strength, "aria-label": "Strength of " + name});
      slider.oninput = () => { value.textContent = Number(slider.value).toFixed(2); };
      slider.onchange = () => act("v1/packs/" + name, {strength: Number(slider.value)}, "PATCH");
      facts.push(make("div", {className: "row"}, slider, value));
    }
    return make("li", {"data-name": name}, make("label", {}, on, name), make("span", {className: "soft"}, " " + pack.editor), ...facts, make("div", {className: "row"}, up, undo, form), note);
  }));
  if (!held) return;
  // The same control, else the switch of the same pack, else the list.
  const same = [...$("packs").children].find((item) => item.dataset.name === held.dataset.name);
  const again = same ? [controls(same)[which], controls(same)[0]].find((one) => one && !one.disabled) : $("packs");
  again.focus({preventScroll: true});
}

// ---- facts of a file
async function check() {
  $("write").disabled = true;
  try {
    const {count, format, findings} = await get("v1/lint", {facts: $("text").value});
    const errors = findings.filter((one) => one.severity === "error").length;
    $("findings").replaceChildren(make("p", {className: errors || !count ? "bad" : "good"}, [counted(count, "fact") + (format ? " (" + format + ")" : ""), counted(errors, "error"), counted(findings.length - errors, "other remark")].join(", ")),
      make("ul", {}, ...findings.map((one) => {
        const go = make("button", {type: "button"}, "line " + one.line);
        go.onclick = () => {
          const lines = $("text").value.split("\n"), begin = lines.slice(0, one.line - 1).join("\n").length + (one.line > 1 ? 1 : 0);
          $("text").focus();
          $("text").setSelectionRange(begin, begin + (lines[one.line - 1] || "").length);
        };
        return make("li", {className: one.severity === "error" ? "bad" : ""}, one.line ? go : "", ` ${one.severity}: ${one.text}`);
      })));
    $("write").disabled = errors > 0 || !count;
  } catch (error) { $("findings").replaceChildren(make("p", {className: "bad"}, error.message)); }
}
async function take(file) {
  if (!file) return;
  try {
    $("text").value = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    check();
  } catch (error) {
    $("write").disabled = true;
    $("findings").replaceChildren(make("p", {className: "bad"}, error instanceof TypeError ? file.name + " is not UTF-8" : error.message));
  }
}
$("file").onchange = () => take($("file").files[0]);
$("drop").ondragover = (event) => { event.preventDefault(); $("drop").classList.add("over"); };
$("drop").ondragleave = () => $("drop").classList.remove("over");
$("drop").ondrop = (event) => { event.preventDefault(); $("drop").classList.remove("over"); take(event.dataTransfer.files[0]); };
$("text").oninput = () => { $("write").disabled = true; };
$("check").onclick = check;
$("write").onclick = () => { $("write").disabled = true; edit({facts: $("text").value, ...($("pack-name").value && {name: $("pack-name").value})}, $("facts-jobs")); };

// ---- trace
$("trace-form").onsubmit = async (event) => {
  event.preventDefault();
  const form = event.target;
  $("traced").replaceChildren(make("p", {className: "soft"}, "tracing … (this may take a minute)"));
  try {
    const {traces: [trace]} = await get("v1/trace", {prompt: form.prompt.value, subject: form.subject.value, samples: 2});
    const rows = trace.restored[form.kind.value], low = trace.corrupted, high = Math.max(trace.clean, low + 1e-6);
    const hangs = trace.clean - low > 0.1 * trace.clean;  // on the subject
    const mix = (v) => `color-mix(in srgb, var(--main) ${Math.round(100 * Math.min(1, Math.max(0, (v - low) / (high - low))))}%, var(--bg))`;
    const table = make("table", {className: "map", "aria-label": "Probability of the answer with one place restored, by token and layer"},
      make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "layer"), ...rows[0].map((_, layer) => make("th", {scope: "col"}, layer % 5 ? "" : String(layer))))),
      make("tbody", {}, ...rows.map((values, t) => {
        const inside = t >= trace.subject_tokens[0] && t < trace.subject_tokens[1];
        return make("tr", {}, make("th", {scope: "row", className: inside ? "subject" : ""}, trace.tokens[t]), ...values.map((v, layer) => {
          const cell = make("td", {title: `layer ${layer}: ${percent(v)}`}, make("span", {className: "hidden"}, percent(v)));
          if (hangs) cell.style.background = mix(v);
          return cell;
        }));
      })));
    $("traced").replaceChildren(make("p", {}, "The model says “", make("bdi", {}, trace.answer.trim()), `” with ${percent(trace.clean)}; with a noised subject ${percent(trace.corrupted)}. ${hangs ? "The stronger the colour, the more of the answer comes back when that place is restored." : "The answer does not hang on the subject, so no place that carries it can be found: ask something that the model knows of it."}`),
      hangs ? make("div", {className: "row soft"}, percent(low), make("div", {className: "scale"}), percent(high)) : "",
      make("div", {className: "scroll", tabIndex: 0, role: "region", "aria-label": "Heat map"}, table));
  } catch (error) { $("traced").replaceChildren(make("p", {className: "bad"}, error.message)); }
};

// ---- reports
async function listReports(wanted = $("report-of").value) {
  try {
    const jobs = (await get("v1/edits")).data.filter((job) => job.status === "done").reverse();
    $("report-of").replaceChildren(...jobs.map((job) => make("option", {value: job.id}, `${job.pack} (${job.editor}, ${job.facts} fact${job.facts === 1 ? "" : "s"})`)));
    if (jobs.some((job) => job.id === wanted)) $("report-of").value = wanted;
    showReport(jobs.length);
  } catch (error) { $("report-note").textContent = error.message; }
}
// A frame cannot send the token: then there is the download.
function showReport(some) {
  const path = `v1/edits/${$("report-of").value}/report`, frame = $("report-frame");
  $("report-save").disabled = !some;
  frame.hidden = !some || Boolean(token);
  $("report-note").textContent = !some ? "No edit was done since the server was started." : token ? "Download it to read it." : "";
  if (!frame.hidden && frame.getAttribute("src") !== path) frame.src = path;
}
$("report-of").onchange = () => showReport(true);
$("report-save").onclick = () => save(`v1/edits/${$("report-of").value}/report`, "report.html").catch((error) => { $("report-note").textContent = error.message; });

start();
