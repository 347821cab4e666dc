// @ts-check
/** The numbers behind an answer: keys, class sums and their products as heat maps (equations 1-3 of the paper). */

/** @typedef {import("./api.js").Explained} Explained */

const SHOWN = 8;

/** @param {string} id */
const $ = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
/** @param {string} id */
const canvas = (id) => /** @type {HTMLCanvasElement} */ ($(id));

/**
 * How many squares wide a heat map of so many numbers is: the divisor that makes it about twice as wide as high.
 * @param {number} count
 */
function columns(count) {
  for (let c = 1; c <= count; c++) if (count % c === 0 && c * c >= 1.4 * count && c * c <= 4 * count) return c;
  return Math.ceil(Math.sqrt(2 * count));
}

/**
 * Orange above zero, blue below, clear at zero; `most` is as strong as it gets.
 * @param {HTMLCanvasElement} on
 * @param {ArrayLike<number>} numbers
 * @param {number} most
 * @param {number} [width]
 */
export function heat(on, numbers, most, width = columns(numbers.length)) {
  const style = getComputedStyle(document.documentElement);
  const [up, down] = ["--up", "--down"].map((name) => style.getPropertyValue(name).trim().split(" ").map(Number));
  on.width = width;
  on.height = Math.ceil(numbers.length / width);
  const paper = on.getContext("2d");
  if (!paper) return;
  const image = paper.createImageData(on.width, on.height);
  for (let i = 0; i < numbers.length; i++) {
    const colour = numbers[i] > 0 ? up : down;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = colour[c];
    image.data[4 * i + 3] = 255 * Math.min(1, Math.abs(numbers[i]) / (most || 1)) ** 0.7;
  }
  paper.putImageData(image, 0, 0);
}

/** @param {ArrayLike<number>} numbers */
const largest = (numbers) => Array.from(numbers).reduce((most, one) => Math.max(most, Math.abs(one)), 0);

/**
 * Show everything of one answer.
 * @param {Explained} explained
 * @param {string} colour a CSS class for what is seen
 * @param {string[]} labels the classes in the order in which the memory has them
 */
export function why(explained, colour, labels) {
  const { key, picture } = explained;
  const rows = explained.rows.slice(0, SHOWN);
  $("why").hidden = rows.length === 0;
  if (!rows.length) return;
  $("width").textContent = String(key.length);
  const seen = /** @type {HTMLImageElement} */ ($("seen"));
  seen.src = picture ? `data:image/png;base64,${picture}` : "";
  seen.className = colour;
  heat(canvas("key"), key, largest(key));
  const place = new Map(labels.map((label, i) => [label, i]));
  const kept = [...rows].sort((a, b) => (place.get(a.label) ?? Infinity) - (place.get(b.label) ?? Infinity));
  binding(explained, kept, rows[0].label);
  remembering(kept, key.length);
  asking(rows, key);
}

/**
 * Step 1: a name times a key.
 * @param {Explained} explained
 * @param {Explained["rows"]} rows
 * @param {string} likeliest
 */
function binding({ key }, rows, likeliest) {
  const choice = /** @type {HTMLSelectElement} */ ($("bound"));
  choice.replaceChildren(...rows.map((row) => new Option(row.label)));
  choice.value = likeliest;
  const draw = () => {
    const column = rows.map((row) => Number(row.label === choice.value));
    heat(canvas("column"), column, 1, 1);
    heat(canvas("rowkey"), key, largest(key), key.length);
    const table = column.flatMap((one) => key.map((number) => one * number));
    heat(canvas("product"), table, largest(key), key.length);
  };
  choice.onchange = draw;
  draw();
}

/**
 * Step 2: the sums.
 * @param {Explained["rows"]} rows
 * @param {number} width
 */
function remembering(rows, width) {
  const all = rows.flatMap((row) => row.sum);
  heat(canvas("table"), all, largest(all), width);
  $("rownames").replaceChildren(
    ...rows.map((row) => {
      const name = document.createElement("li");
      name.textContent = `${row.label} (${row.examples} ${row.examples === 1 ? "key" : "keys"})`;
      name.title = name.textContent;
      return name;
    }),
  );
}

/**
 * Step 3: the products that make each bar.
 * @param {Explained["rows"]} rows
 * @param {number[]} key
 */
function asking(rows, key) {
  const units = rows.map((row) => row.sum.map((number) => number / (row.length || 1)));
  const products = units.map((row) => row.map((number, i) => number * key[i]));
  const most = largest(products.flat());
  const heads = line("heads", "", ["row", "×", "key", "=", "products"], "added up");
  $("products").replaceChildren(
    heads,
    ...rows.map((row, r) => {
      const maps = [units[r], key, products[r]].map((numbers, which) => {
        const map = document.createElement("canvas");
        map.setAttribute("role", "img");
        map.setAttribute("aria-label", ["The row of ", "Your key, for ", "The products for "][which] + row.label);
        heat(map, numbers, which === 2 ? most : largest(numbers));
        map.onpointermove = (event) => point(event, map, row.label, units[r], key);
        return map;
      });
      const sum = products[r].reduce((total, one) => total + one, 0);
      const said = `${sum.toFixed(2).replace(/^-(?=[0.]+$)/, "")} → ${percent(row.probability)}`;
      return line("", row.label, [maps[0], "×", maps[1], "=", maps[2]], said);
    }),
  );
}

/**
 * @param {string} kind
 * @param {string} label
 * @param {(string|HTMLElement)[]} parts
 * @param {string} sum
 */
function line(kind, label, parts, sum) {
  const made = document.createElement("div");
  made.className = `line ${kind}`;
  const name = document.createElement("b");
  name.textContent = name.title = label;
  const total = document.createElement("span");
  total.className = "sum";
  total.textContent = sum;
  const cells = parts.map((part) => {
    if (typeof part !== "string") return part;
    const text = document.createElement("span");
    text.textContent = part;
    return text;
  });
  made.append(name, ...cells, total);
  return made;
}

/**
 * @param {PointerEvent} event
 * @param {HTMLCanvasElement} map
 * @param {string} label
 * @param {number[]} row
 * @param {number[]} key
 */
function point(event, map, label, row, key) {
  const box = map.getBoundingClientRect();
  const x = Math.floor(((event.clientX - box.left) / box.width) * map.width);
  const y = Math.floor(((event.clientY - box.top) / box.height) * map.height);
  const i = y * map.width + x;
  if (!(i >= 0 && i < key.length)) return;
  const [a, b] = [row[i], key[i]];
  $("cell").textContent = `Number ${i + 1} of ${label}: ${a.toFixed(3)} × ${b.toFixed(3)} = ${(a * b).toFixed(4)}`;
}

/** @param {number} chance */
export const percent = (chance) =>
  chance > 0.995 && chance < 1 ? "> 99 %" : chance > 0 && chance < 0.005 ? "< 1 %" : `${Math.round(100 * chance)} %`;
