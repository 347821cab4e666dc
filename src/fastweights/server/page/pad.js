// @ts-check
/** Paper to draw on: by mouse, pen, finger or the arrow keys. Ink is black on white, whatever the page looks like. */

const PEN = 11;
const STEP = 7;

export class Pad {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {(done: boolean) => void} changed told of every change; `done` when the pen was lifted
   */
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.empty = true;
    const ink = canvas.getContext("2d", { willReadFrequently: true });
    if (!ink) throw new Error("This browser cannot draw.");
    this.ink = ink;
    /** @type {{x: number, y: number}|null} where the pen is down */
    this.pen = null;
    this.cursor = { x: canvas.width / 2, y: canvas.height / 2, down: false };
    this.clear();
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => this.#up());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#up());
  }

  clear() {
    this.ink.fillStyle = "white";
    this.ink.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.empty = true;
    this.pen = null;
    this.cursor.down = false;
    this.changed(true);
  }

  /**
   * Put a picture onto the paper: all of it, or as much from its middle as covers the paper.
   * @param {CanvasImageSource & {width: number, height: number}} picture
   * @param {boolean} cover
   */
  place(picture, cover) {
    const { width, height } = this.canvas;
    const sides = [width / picture.width, height / picture.height];
    const scale = cover ? Math.max(...sides) : Math.min(...sides);
    const [w, h] = [picture.width * scale, picture.height * scale];
    this.ink.fillStyle = "white";
    this.ink.fillRect(0, 0, width, height);
    this.ink.drawImage(picture, (width - w) / 2, (height - h) / 2, w, h);
    this.empty = false;
    this.changed(true);
  }

  /** @returns {Promise<Blob>} */
  picture() {
    return new Promise((done, fail) => {
      const take = (/** @type {Blob|null} */ blob) => (blob ? done(blob) : fail(new Error("It cannot be saved.")));
      this.canvas.toBlob(take, "image/png");
    });
  }

  /** @param {PointerEvent} event */
  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * this.canvas.width,
      y: ((event.clientY - box.top) / box.height) * this.canvas.height,
    };
  }

  /** @param {PointerEvent} event */
  #down(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pen = this.#at(event);
    this.#line(this.pen, this.pen);
  }

  /** @param {PointerEvent} event */
  #move(event) {
    if (!this.pen || this.cursor.down) return;
    for (const one of event.getCoalescedEvents?.() ?? [event]) {
      const to = this.#at(one);
      this.#line(this.pen, to);
      this.pen = to;
    }
  }

  #up() {
    if (!this.pen) return;
    this.pen = null;
    this.cursor.down = false;
    this.changed(true);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (by) {
      const from = { ...this.cursor };
      const far = STEP * (event.shiftKey ? 4 : 1);
      this.cursor.x = Math.min(Math.max(from.x + far * by[0], PEN), this.canvas.width - PEN);
      this.cursor.y = Math.min(Math.max(from.y + far * by[1], PEN), this.canvas.height - PEN);
      if (this.cursor.down) this.#line(from, this.cursor);
    } else if (event.key === " ") {
      this.cursor.down = !this.cursor.down;
      if (this.cursor.down) {
        this.pen = this.cursor;
        this.#line(this.cursor, this.cursor);
      } else {
        this.#up();
      }
    } else if (event.key === "Escape") {
      this.clear();
    } else {
      return;
    }
    event.preventDefault();
  }

  /**
   * @param {{x: number, y: number}} from
   * @param {{x: number, y: number}} to
   */
  #line(from, to) {
    this.ink.lineWidth = PEN;
    this.ink.lineCap = this.ink.lineJoin = "round";
    this.ink.strokeStyle = "black";
    this.ink.beginPath();
    this.ink.moveTo(from.x, from.y);
    this.ink.lineTo(to.x + 0.01, to.y);
    this.ink.stroke();
    this.empty = false;
    this.changed(false);
  }
}
