// Search without a server: pages opened from a disk may not start workers, so the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc =
        "<script>self.postMessage = data => self.answer(data)</script>" + `<script src="${url}"></script>`
      this.started = new Promise(done => (frame.onload = () => done(frame.contentWindow)))
      this.started.then(inside => {
        inside.answer = data => this.dispatchEvent(new MessageEvent("message", { data }))
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.started.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
