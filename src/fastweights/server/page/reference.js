// @ts-check
/** The interface as openapi.json describes it, to be read by people. */

import { authorized } from "./api.js";

/**
 * @param {string} tag
 * @param {string} text
 * @param {string} [kind]
 */
function element(tag, text, kind = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className: kind });
}

/**
 * @param {any} schema
 * @returns {string}
 */
function shape(schema) {
  if (!schema) return "anything";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(shape).join(" or ");
  return schema.type === "array" ? `list of ${shape(schema.items)}` : schema.type ?? "anything";
}

/**
 * @param {string} verb
 * @param {string} path
 * @param {any} one
 */
function described(verb, path, one) {
  const made = document.createElement("article");
  const title = element("h3", "");
  title.append(element("span", verb.toUpperCase(), "verb"), element("code", path));
  made.append(title, element("p", one.summary ?? ""));
  const parameters = (one.parameters ?? []).filter((/** @type {any} */ p) => p.in === "query");
  for (const p of parameters) {
    const said = p.description ?? p.schema?.description ?? "";
    const line = element("p", `${p.required ? "" : "optional "}${shape(p.schema)}. ${said}`, "quiet");
    line.prepend(element("code", `?${p.name}`), " ");
    made.append(line);
  }
  const bodies = Object.keys(one.requestBody?.content ?? {});
  if (bodies.length) made.append(element("p", `Body: ${bodies.join(", ")}`, "quiet"));
  const answer = Object.entries(one.responses).find(([code]) => code.startsWith("2"));
  if (answer) {
    const [code, { content }] = /** @type {[string, any]} */ (answer);
    made.append(element("p", `Answer: ${code} ${shape(content?.["application/json"]?.schema)}`, "quiet"));
  }
  return made;
}

/**
 * @param {string} name
 * @param {any} schema
 */
function defined(name, schema) {
  const made = document.createElement("article");
  made.append(element("h3", name));
  for (const [field, one] of Object.entries(schema.properties ?? {})) {
    const line = element("p", `${shape(one)}. ${one.description ?? ""}`, "quiet");
    line.prepend(element("code", field), " ");
    made.append(line);
  }
  return made;
}

for (const here of document.querySelectorAll(".here")) here.textContent = location.origin;
const found = await (await fetch("openapi.json", { headers: authorized() })).json();
const routes = Object.entries(found.paths ?? {}).flatMap(([path, verbs]) =>
  Object.entries(verbs).map(([verb, one]) => described(verb, path, one)),
);
const shapes = Object.entries(found.components?.schemas ?? {}).map(([name, schema]) => defined(name, schema));
const parts = [element("h2", "What can be asked"), ...routes, element("h2", "Shapes"), ...shapes];
document.getElementById("reference")?.append(...parts);
