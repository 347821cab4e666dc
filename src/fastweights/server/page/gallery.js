// @ts-check
/** Ready-made tasks: five classes, one example each, and further drawings of them to ask about. */

import { characters } from "./api.js";

/** @typedef {{label: string, pictures: Blob[]}} Shown */
/** @typedef {{title: string, words: string, make: (variant: number) => Promise<Shown[]>}} Task */

const SIDE = 140;

/** @type {Record<string, [number, number][][]>} strokes in a square of side 1 */
const SIGNS = {
  house: [[[0.2, 0.9], [0.2, 0.45], [0.8, 0.45], [0.8, 0.9], [0.2, 0.9]], [[0.1, 0.5], [0.5, 0.12], [0.9, 0.5]]],
  star: [[[0.5, 0.08], [0.74, 0.88], [0.1, 0.38], [0.9, 0.38], [0.26, 0.88], [0.5, 0.08]]],
  tree: [[[0.5, 0.95], [0.5, 0.45]], [[0.5, 0.5], [0.2, 0.5], [0.5, 0.05], [0.8, 0.5], [0.5, 0.5]]],
  fish: [[[0.05, 0.3], [0.3, 0.55], [0.6, 0.28], [0.9, 0.5], [0.6, 0.72], [0.3, 0.45], [0.05, 0.7], [0.05, 0.3]]],
  key: [
    [[0.35, 0.25], [0.2, 0.12], [0.08, 0.27], [0.2, 0.42], [0.35, 0.27], [0.92, 0.8]],
    [[0.92, 0.8], [0.8, 0.92]],
    [[0.76, 0.66], [0.65, 0.77]],
  ],
};
const LETTERS = ["a", "e", "g", "k", "R"];
const FONTS = ["sans-serif", "serif", "monospace", "italic serif", "bold sans-serif"];

/**
 * @param {(pen: CanvasRenderingContext2D) => void} draw
 * @returns {Promise<Blob>}
 */
function drawn(draw) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIDE;
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.fillStyle = "white";
  pen.fillRect(0, 0, SIDE, SIDE);
  pen.fillStyle = pen.strokeStyle = "black";
  draw(pen);
  return new Promise((done) => canvas.toBlob((blob) => done(/** @type {Blob} */ (blob)), "image/png"));
}

/**
 * Numbers from 0 to 1 that are the same for the same seed.
 * @param {number} seed
 */
function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/**
 * A sign by a shaky hand.
 * @param {[number, number][][]} strokes
 * @param {number} seed
 */
function sign(strokes, seed) {
  const chance = random(seed * 7919 + 17);
  for (let i = 0; i < 5; i++) chance();
  const shaky = () => (chance() - 0.5) * 0.09;
  return drawn((pen) => {
    pen.lineWidth = 4 + 3 * chance();
    pen.lineCap = pen.lineJoin = "round";
    pen.translate(SIDE / 2, SIDE / 2);
    pen.rotate((chance() - 0.5) * 0.3);
    pen.scale(0.65 + 0.25 * chance(), 0.65 + 0.25 * chance());
    for (const stroke of strokes) {
      pen.beginPath();
      for (const [x, y] of stroke) pen.lineTo(SIDE * (x - 0.5 + shaky()), SIDE * (y - 0.5 + shaky()));
      pen.stroke();
    }
  });
}

/**
 * @param {string} letter
 * @param {string} font
 */
function glyph(letter, font) {
  const [family, style = ""] = font.split(" ").reverse();
  return drawn((pen) => {
    pen.font = `${style} 100px ${family}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(letter, SIDE / 2, SIDE / 2);
  });
}

/**
 * @param {string} text a PNG in base64
 * @returns {Blob}
 */
function decoded(text) {
  return new Blob([Uint8Array.from(atob(text), (mark) => mark.charCodeAt(0))], { type: "image/png" });
}

/** @type {Task[]} */
export const TASKS = [
  {
    title: "Signs",
    words: "Five things, drawn by a shaky hand.",
    make: (variant) =>
      Promise.all(
        Object.entries(SIGNS).map(async ([label, strokes], i) => ({
          label,
          pictures: await Promise.all([0, 1, 2].map((n) => sign(strokes, 100 * variant + 10 * i + n))),
        })),
      ),
  },
  {
    title: "Invented characters",
    words: "Nobody has ever seen these: they are made up on the spot.",
    make: async (variant) =>
      (await characters(variant)).classes.map(({ label, pictures }) => ({ label, pictures: pictures.map(decoded) })),
  },
  {
    title: "Letters",
    words: "Shown in one typeface, asked in others.",
    make: () =>
      Promise.all(
        LETTERS.map(async (label) => ({ label, pictures: await Promise.all(FONTS.map((font) => glyph(label, font))) })),
      ),
  },
];
