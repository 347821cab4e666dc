// @ts-check
/** One picture by the camera: in the page where browsers allow it (https, or this machine), else by the phone's own. */

import { closed } from "./dialogs.js";

/**
 * @param {HTMLDialogElement} dialog @param {HTMLVideoElement} video @param {HTMLInputElement} fallback
 * @returns {Promise<ImageBitmap|null>} null where the picture comes by `fallback`, or not at all
 */
export async function photograph(dialog, video, fallback) {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    fallback.click();
    return null;
  }
  try {
    video.srcObject = stream;
    await video.play();
    return (await closed(dialog)) ? await createImageBitmap(video) : null;
  } finally {
    for (const track of stream.getTracks()) track.stop();
    video.srcObject = null;
  }
}
