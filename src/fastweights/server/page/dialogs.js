// @ts-check
/** Questions to the person at the page. Enter answers them, Escape and Cancel take them back. */

/** @param {string} id */
const dialog = (id) => /** @type {HTMLDialogElement} */ (document.getElementById(id));

/**
 * Show a dialog until it is closed.
 * @param {HTMLDialogElement} shown
 * @returns {Promise<string>} the value of the button that closed it; empty for none
 */
export function closed(shown) {
  shown.returnValue = "";
  if (!shown.open) shown.showModal();
  return new Promise((done) => shown.addEventListener("close", () => done(shown.returnValue), { once: true }));
}

/**
 * Ask for another name.
 * @param {string} what
 * @param {string} name the one it has
 * @returns {Promise<string>} empty where it keeps its name
 */
export async function renamed(what, name) {
  const field = /** @type {HTMLInputElement} */ (document.getElementById("another"));
  const title = /** @type {HTMLElement} */ (document.getElementById("naming-what"));
  title.textContent = what;
  field.value = name;
  const answer = closed(dialog("naming"));
  field.select();
  const said = (await answer) ? field.value.trim() : "";
  return said === name ? "" : said;
}

/**
 * Ask before something is done that cannot be undone.
 * @param {string} sentence
 */
export async function confirmed(sentence) {
  const text = /** @type {HTMLElement} */ (document.getElementById("deleting-what"));
  text.textContent = sentence;
  return Boolean(await closed(dialog("deleting")));
}
