// @ts-check
/**
 * Questions to the service, and the memories that this browser knows.
 *
 * @typedef {{classes: number, examples: number, undoable: number}} Counts
 * @typedef {Counts & {id: string, title: string, model: string|null, takes: string, ink: boolean}} Memory
 * @typedef {{id: number, name: string, picture: string|null}} Example
 * @typedef {{label: string, count: number, examples: Example[]}} Class
 * @typedef {{label: string, probability: number, similarity: number, examples: number}} Likely
 * @typedef {Likely & {sum: number[], length: number}} Row
 * @typedef {{id: number, part: number}} Spoke
 * @typedef {{label: string|null, known: number, likely: Likely[], examples: Spoke[], note: string|null}} Answer
 * @typedef {{answer: Answer|null, key: number[], rows: Row[], picture: string|null}} Explained
 */

/** What went wrong, in a sentence that can be shown. */
export class Refused extends Error {
  /**
   * @param {number} status
   * @param {string} sentence
   */
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

/**
 * Asks for the token, where the service wants one.
 * @type {() => Promise<string>}
 */
let askToken = async () => "";
/** @param {() => Promise<string>} how */
export function whenLocked(how) {
  askToken = how;
}

/**
 * The header that shows the token; in UTF-8, of which a header wants every byte as a letter of its own.
 *
 * @returns {Record<string, string>}
 */
export function authorized() {
  const token = sessionStorage.getItem("fastweights.token");
  if (!token) return {};
  return { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(token))}` };
}

/**
 * @param {string} method
 * @param {string} path
 * @param {{body?: BodyInit, type?: string}} options
 * @returns {Promise<Response>}
 */
async function ask(method, path, options = {}) {
  const { body, type } = options;
  for (;;) {
    /** @type {Record<string, string>} */
    const headers = { ...authorized(), ...(type ? { "Content-Type": type } : {}) };
    let answer;
    try {
      answer = await fetch(`v1${path}`, { method, body, headers });
    } catch {
      throw new Refused(0, "The service does not answer. Is it still running?");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) {
      sessionStorage.setItem("fastweights.token", await askToken());
      continue;
    }
    const why = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, why.error ?? `The service answered ${answer.status}.`);
  }
}

/**
 * @param {string} method
 * @param {string} path
 * @param {object} [options]
 */
const json = async (method, path, options) => (await ask(method, path, options)).json();
const put = (/** @type {string} */ id) => `/memories/${encodeURIComponent(id)}`;
const query = (/** @type {Record<string, string>} */ values) => new URLSearchParams(values).toString();

const said = (/** @type {object} */ what) => ({ body: JSON.stringify(what), type: "application/json" });

/**
 * @param {string} title
 * @returns {Promise<Memory>}
 */
export const make = (title) => json("POST", "/memories", said({ title }));
/**
 * @param {string} id
 * @param {string} title
 * @returns {Promise<Memory>}
 */
export const rename = (id, title) => json("PATCH", put(id), said({ title }));
/** @param {string} id */
export const remove = (id) => ask("DELETE", put(id));
/**
 * @param {string} id
 * @returns {Promise<Memory>}
 */
export const look = (id) => json("GET", put(id));
/**
 * @param {string} id
 * @returns {Promise<{classes: Class[], total: number}>}
 */
export const classes = (id) => json("GET", `${put(id)}/classes?pictures=true&limit=60`);
/**
 * @param {string} id
 * @param {string} label
 * @param {Blob} picture
 * @param {string} [name]
 */
export const show = (id, label, picture, name = "") =>
  json("POST", `${put(id)}/examples?${query({ label, name })}`, { body: picture, type: picture.type });
/**
 * @param {string} id
 * @param {Blob} picture
 * @returns {Promise<Explained>}
 */
export const explain = (id, picture) =>
  json("POST", `${put(id)}/explain?top=12`, { body: picture, type: picture.type });
/**
 * @param {string} id
 * @param {string} label
 */
export const forgetClass = (id, label) => json("DELETE", `${put(id)}/classes?${query({ label })}`);
/**
 * @param {string} id
 * @param {number} example
 */
export const forgetExample = (id, example) => json("DELETE", `${put(id)}/examples/${example}`);
/**
 * @param {string} id
 * @param {string} label
 * @param {string} name
 */
export const renameClass = (id, label, name) =>
  json("PATCH", `${put(id)}/classes?${query({ label })}`, said({ label: name }));
/** @param {string} id */
export const forgetAll = (id) => json("DELETE", `${put(id)}/examples`);
/**
 * @param {string} id
 * @returns {Promise<{undone: string}>}
 */
export const undo = (id) => json("POST", `${put(id)}/undo`);
/** @param {string} id */
export const download = async (id) => (await ask("GET", `${put(id)}/file`)).blob();
/**
 * @param {File} file
 * @returns {Promise<Memory>}
 */
export const upload = (file) =>
  json("POST", `/files?${query({ title: file.name.replace(/\.fw$/, "").slice(0, 200) })}`, {
    body: file,
    type: "application/octet-stream",
  });
/**
 * @param {number} seed
 * @returns {Promise<{classes: {label: string, pictures: string[]}[]}>}
 */
export const characters = (seed) => json("GET", `/tasks/characters?seed=${seed}`);

const KNOWN = "fastweights.memories";
/**
 * The memories that were open in this browser, the last one first.
 * @returns {{id: string, title: string}[]}
 */
export function known() {
  try {
    return JSON.parse(localStorage.getItem(KNOWN) ?? "[]");
  } catch {
    return [];
  }
}
/**
 * @param {string} id
 * @param {string} [title] the title; without one it is not known any more
 */
export function remember(id, title) {
  const others = known().filter((one) => one.id !== id);
  const all = title === undefined ? others : [{ id, title }, ...others];
  localStorage.setItem(KNOWN, JSON.stringify(all.slice(0, 50)));
}
