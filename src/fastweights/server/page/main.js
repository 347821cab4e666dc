// @ts-check
/** The page: what is drawn is asked about at once; what is named is shown; all of it is kept by the service. */

import * as api from "./api.js";
import { photograph } from "./camera.js";
import { closed, confirmed, renamed } from "./dialogs.js";
import { TASKS } from "./gallery.js";
import { Pad } from "./pad.js";
import { percent, why } from "./why.js";

const WHILE_DRAWING = 120;
const LIKELY = 10;

/** @param {string} id */
const $ = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const input = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ ($(id));
const button = (/** @type {string} */ id) => /** @type {HTMLButtonElement} */ ($(id));

/** @type {api.Memory} */
let memory;
/** @type {api.Class[]} */
let classes = [];
/** @type {Blob[]} what a ready-made task has left to ask about */
let untried = [];

// Words

/**
 * @param {string} sentence
 * @param {boolean} [wrong]
 */
function say(sentence, wrong = false) {
  $("status").textContent = sentence;
  $("status").classList.toggle("wrong", wrong);
}

/** @type {Promise<void>|null} */
let opening = null;

/** What a visitor does first waits until there is a memory for it; if opening fails, the next attempt tries anew. */
function opened() {
  opening ??= (async () => {
    await open(await first());
    document.body.dataset.ready = "yes";
  })();
  opening.catch(() => {
    opening = null;
  });
  return opening;
}

/**
 * Do something, and say what went wrong if it does.
 * @param {() => Promise<unknown>} work
 */
async function trying(work) {
  try {
    await opened();
    await work();
  } catch (error) {
    say(error instanceof Error ? error.message : String(error), true);
  }
}

/**
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Node|string)} children
 */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Asking

/** Drawings are kept as bright ink on black, and shown as ink on paper. */
const inky = () => (memory.ink ? "ink" : "");
let asking = false;
let again = false;
let last = 0;

/** Ask about what is on the pad; one question at a time, the newest last. */
async function ask() {
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  $("answer").setAttribute("aria-busy", "true");
  do {
    again = false;
    last = performance.now();
    if (pad.empty) {
      showAnswer(null);
      continue;
    }
    await trying(async () => {
      const before = memory.id;
      const found = await api.explain(before, await pad.picture());
      if (before === memory.id && !pad.empty) showAnswer(found);
    });
  } while (again);
  asking = false;
  $("answer").setAttribute("aria-busy", "false");
}

/** @param {api.Explained|null} found */
function showAnswer(found) {
  const answer = found?.answer;
  $("bars").classList.toggle("unsure", answer?.label === null);
  $("verdict").replaceChildren(...verdict(answer ?? null));
  const rows = answer ? answer.likely.slice(0, LIKELY) : [];
  $("bars").replaceChildren(...rows.map(bar));
  $("because").replaceChildren(...because(answer ?? null));
  const labels = classes.map((one) => one.label);
  if (found) why(found, inky(), labels);
  else $("why").hidden = true;
}

/**
 * @param {api.Answer|null} answer
 * @returns {(Node|string)[]}
 */
function verdict(answer) {
  if (!answer) {
    if (!classes.length) return ["Teach it two things or more, then draw one of them again."];
    return [pad.empty ? "Draw one of them again." : "Show it something first."];
  }
  if (answer.note) return [answer.note];
  const [best] = answer.likely;
  if (answer.label !== null) return [element("strong", { textContent: best.label }), ` ${percent(best.probability)}`];
  const guess = classes.length > 1 ? ` If one of them, then ${best.label}.` : "";
  return [element("strong", { textContent: "None of these?" }), `${guess} If it is new, name it and show it.`];
}

/** @param {api.Likely} one */
function bar(one) {
  const fill = element("div", { className: "fill" });
  fill.style.width = `${100 * one.probability}%`;
  const teach = smallButton("It is", `It is ${one.label}: show it as one more example`, () =>
    trying(() => show(one.label)),
  );
  return element(
    "li",
    {},
    element("span", { className: "label", textContent: one.label, title: one.label }),
    element("div", { className: "track" }, fill),
    element("span", { className: "percent", textContent: percent(one.probability) }),
    teach,
  );
}

/**
 * The examples that spoke for an answer.
 * @param {api.Answer|null} answer
 * @returns {(Node|string)[]}
 */
function because(answer) {
  const all = new Map(classes.flatMap((one) => one.examples.map((example) => [example.id, example])));
  const spoke = (answer?.examples ?? []).map(({ id }) => all.get(id)).filter((one) => one?.picture);
  return spoke.length ? ["Because of ", ...spoke.map((one) => thumb(/** @type {api.Example} */ (one), "thumb"))] : [];
}

/**
 * @param {api.Example} example
 * @param {string} kind
 */
function thumb(example, kind) {
  const src = `data:image/png;base64,${example.picture}`;
  return element("img", { src, alt: example.name || "an example", className: `${kind} ${inky()}` });
}

// Teaching

/** @param {string} label */
async function show(label) {
  if (pad.empty) throw new Error("Draw something first.");
  await api.show(memory.id, label, await pad.picture());
  input("name").value = "";
  pad.clear();
  await refresh();
  if (document.activeElement === document.body) $("pad").focus({ preventScroll: true });
  say(`Learnt: ${label}.`);
}

/**
 * @param {() => Promise<unknown>} change
 * @param {string} said
 */
async function changing(change, said) {
  await change();
  await refresh();
  say(said);
  await ask();
}

async function refresh() {
  const [now, found] = await Promise.all([api.look(memory.id), api.classes(memory.id)]);
  memory = now;
  classes = found.classes;
  api.remember(memory.id, titleOf(memory));
  listMemories();
  button("undo").disabled = !memory.undoable;
  button("download").disabled = button("reset").disabled = !memory.examples;
  $("nothing").hidden = Boolean(classes.length);
  $("gallery").hidden = Boolean(classes.length);
  $("more").hidden = found.total <= classes.length;
  $("more").textContent = `… and ${found.total - classes.length} more classes.`;
  showCards();
  $("names").replaceChildren(...classes.map((one) => element("option", { value: one.label })));
  if (pad.empty) showAnswer(null);
  const takes = memory.takes;
  if (!takes.includes("pictures")) say(`This memory takes ${takes}, over HTTP; make a new one to draw.`, true);
}

/** The classes anew; who is there by keyboard stays where they are. */
function showCards() {
  const buttons = () => [...$("cards").querySelectorAll("button")];
  const at = buttons().indexOf(/** @type {HTMLButtonElement} */ (document.activeElement));
  $("cards").replaceChildren(...classes.map(card));
  if (at >= 0) (buttons()[at] ?? buttons().at(-1) ?? $("name")).focus();
}

/** @param {string} label */
async function renameClass(label) {
  const name = await renamed(`Another name for ${label}`, label);
  if (!name) return;
  const joined = classes.some((one) => one.label === name);
  const now = joined ? `${label} and ${name} are one now` : `${label} is called ${name} now`;
  await changing(() => api.renameClass(memory.id, label, name), `${now}; Undo brings it back.`);
}

/**
 * @param {() => Promise<unknown>} forget
 * @param {string} what
 */
const forgetting = (forget, what) => trying(() => changing(forget, `Forgotten: ${what}; Undo brings it back.`));

/**
 * @param {string} text
 * @param {string} title what it does, in full
 * @param {() => unknown} onclick
 */
function smallButton(text, title, onclick) {
  const made = element("button", { type: "button", className: "small", textContent: text, title, onclick });
  made.setAttribute("aria-label", title);
  return made;
}

/** @param {api.Class} one */
function card(one) {
  const examples = one.examples.map((example) => {
    const title = `Forget ${example.name || `example ${example.id}`} of ${one.label}`;
    const forget = () => forgetting(() => api.forgetExample(memory.id, example.id), `one ${one.label}`);
    const made = element(
      "button",
      { type: "button", className: "example", title, onclick: forget },
      example.picture ? thumb(example, "") : "·",
    );
    made.setAttribute("aria-label", title);
    return made;
  });
  const forget = () => forgetting(() => api.forgetClass(memory.id, one.label), one.label);
  return element(
    "li",
    { className: "card" },
    element("h3", { textContent: one.label, title: one.label }),
    element(
      "header",
      {},
      element("span", { className: "quiet", textContent: `${one.count} example${one.count === 1 ? "" : "s"}` }),
      smallButton("✎", `Rename ${one.label}`, () => trying(() => renameClass(one.label))),
      smallButton("✕", `Forget ${one.label}`, forget),
    ),
    element("div", { className: "examples" }, ...examples),
  );
}

// Memories

/** @param {{title: string, made?: number}} one */
const titleOf = (one) => one.title || "My memory";

function listMemories() {
  const choice = /** @type {HTMLSelectElement} */ ($("memories"));
  choice.replaceChildren(...api.known().map(({ id, title }) => new Option(title, id, false, id === memory.id)));
}

/** @param {api.Memory} one */
async function open(one) {
  const isFirst = !memory; // what is on the paper by then is for it
  memory = one;
  untried = [];
  showTray();
  history.replaceState(null, "", `#${memory.id}`);
  if (!isFirst) pad.clear();
  await refresh();
  if (isFirst && !pad.empty) ask();
}

/** The memory that the address names, or the last one, or a new one. */
async function first() {
  const named = location.hash.slice(1);
  for (const id of [named, ...api.known().map((one) => one.id)].filter(Boolean)) {
    try {
      return await api.look(id);
    } catch (error) {
      if (!(error instanceof api.Refused) || error.status !== 404) throw error;
      api.remember(id);
    }
  }
  return api.make("");
}

async function renameMemory() {
  const title = await renamed("Another name for this memory", titleOf(memory));
  if (!title) return;
  await api.rename(memory.id, title);
  await refresh();
  say(`It is called ${title} now.`);
}

async function deleteMemory() {
  const { classes: count } = memory;
  const of = count ? ` and its ${count} class${count === 1 ? "" : "es"}` : "";
  if (!(await confirmed(`Delete ${titleOf(memory)}${of} for good? This cannot be undone.`))) return;
  const gone = titleOf(memory);
  await api.remove(memory.id);
  api.remember(memory.id);
  history.replaceState(null, "", location.pathname);
  await open(await first());
  say(`Deleted: ${gone}.`);
}

// Ready-made tasks

/** @param {import("./gallery.js").Task} task */
async function taskButton(task) {
  const variant = Math.floor(Math.random() * 1e6);
  const made = await task.make(variant);
  const strip = element("div", { className: "strip" });
  for (const { label, pictures } of made) {
    strip.append(element("img", { src: URL.createObjectURL(pictures[0]), alt: label }));
  }
  const choose = element(
    "button",
    { type: "button", onclick: () => trying(() => begin(task, made)) },
    strip,
    element("b", { textContent: task.title }),
    element("div", { className: "quiet", textContent: task.words }),
  );
  return element("li", {}, choose);
}

/**
 * @param {import("./gallery.js").Task} task
 * @param {import("./gallery.js").Shown[]} made
 */
async function begin(task, made) {
  if (memory.examples) await open(await api.make(task.title));
  for (const { label, pictures } of made) await api.show(memory.id, label, pictures[0]);
  untried = made.flatMap(({ pictures }) => pictures.slice(1)).sort(() => Math.random() - 0.5);
  showTray();
  await refresh();
  say(`Learnt: ${made.map((one) => one.label).join(", ")}.`);
}

function showTray() {
  $("tray").hidden = !untried.length;
  $("queries").replaceChildren(
    ...untried.map((picture, i) => {
      const src = URL.createObjectURL(picture);
      const choose = element(
        "button",
        { type: "button", onclick: () => trying(() => place(picture)) },
        element("img", { src, alt: `Drawing ${i + 1}` }),
      );
      return element("li", {}, choose);
    }),
  );
}

// Pictures

/** @param {Blob} picture */
async function place(picture) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(picture);
  } catch {
    throw new Error("This is no picture that the browser can read.");
  }
  pad.place(bitmap, !memory.ink);
}

/**
 * One picture is put onto the pad; several are shown at once, if they have a name.
 * @param {File[]} files
 */
async function take(files) {
  if (files.length > 1) {
    const label = input("name").value.trim();
    if (!label) throw new Error("Name them first, then choose several pictures of one kind.");
    for (const file of files) await api.show(memory.id, label, file, file.name);
    await refresh();
    say(`Learnt: ${files.length} of ${label}.`);
  } else if (files.length) {
    await place(files[0]);
  }
}

const pad = new Pad(/** @type {HTMLCanvasElement} */ ($("pad")), (done) => {
  queueMicrotask(() => {
    $("invitation").hidden = !pad.empty;
    if (memory && (done || performance.now() - last > WHILE_DRAWING)) ask();
  });
});

function listen() {
  $("clear").onclick = () => pad.clear();
  $("teach").onsubmit = (event) => {
    event.preventDefault();
    const label = input("name").value.trim();
    if (label) trying(() => show(label));
    else {
      say("What is it? Give it a name.", true);
      input("name").focus();
    }
  };
  $("undo").onclick = () => trying(() => changing(() => api.undo(memory.id), "Undone."));
  $("reset").onclick = () =>
    trying(() => changing(() => api.forgetAll(memory.id), "Everything is forgotten; Undo brings it back."));
  $("new").onclick = () => trying(async () => open(await api.make(`Memory ${api.known().length + 1}`)));
  $("rename").onclick = () => trying(renameMemory);
  $("delete").onclick = () => trying(deleteMemory);
  $("memories").onchange = () => trying(async () => open(await api.look(input("memories").value)));
  $("download").onclick = () => trying(save);
  $("load").onclick = () => input("file").click();
  $("picture").onclick = () => input("pictures").click();
  $("camera").onclick = () => trying(takePhoto);
  for (const id of ["pictures", "capture", "file"]) {
    input(id).onchange = () => {
      const files = [...(input(id).files ?? [])];
      input(id).value = "";
      trying(() => (id === "file" ? load(files[0]) : take(files)));
    };
  }
  addEventListener("keydown", (event) => {
    const writing = event.target instanceof HTMLInputElement;
    if ((event.ctrlKey || event.metaKey) && event.key === "z" && !writing && !button("undo").disabled) {
      event.preventDefault();
      button("undo").click();
    }
  });
  addEventListener("hashchange", () => trying(async () => open(await first())));
  addEventListener("dragover", (event) => {
    event.preventDefault();
    $("frame").classList.add("over");
  });
  addEventListener("dragleave", () => $("frame").classList.remove("over"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    $("frame").classList.remove("over");
    const files = [...(event.dataTransfer?.files ?? [])];
    trying(() => (files[0]?.name.endsWith(".fw") ? load(files[0]) : take(files)));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => ask());
}

async function takePhoto() {
  const dialog = /** @type {HTMLDialogElement} */ ($("shutter"));
  const picture = await photograph(dialog, /** @type {HTMLVideoElement} */ ($("video")), input("capture"));
  if (picture) pad.place(picture, !memory.ink);
}

async function save() {
  const href = URL.createObjectURL(await api.download(memory.id));
  element("a", { href, download: `${titleOf(memory)}.fw` }).click();
}

/** @param {File|undefined} file */
async function load(file) {
  if (!file) return;
  await open(await api.upload(file));
  say(`Loaded: ${titleOf(memory)}.`);
}

/**
 * Ask for the token in the page.
 * @returns {Promise<string>}
 */
function askToken() {
  return closed(/** @type {HTMLDialogElement} */ ($("locked"))).then(() => input("token").value);
}

api.whenLocked(askToken);
listen();
await trying(async () => {
  $("tasks").replaceChildren(...(await Promise.all(TASKS.map(taskButton))));
});
