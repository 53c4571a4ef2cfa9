// Browsers start no worker from a page that was opened from the disk, and the search of the site is
// a worker. In its place, there, a hidden frame runs the worker's script. Of a worker it has what the
// search calls: messages both ways, and an end. Zensical's own shim of this name is on a server.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      this.ready = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = (event) => { reject(event); this.onerror?.(event); };
        inner.postMessage = (sent) => {
          const data = structuredClone(sent); // as a worker's messages are
          setTimeout(() => this.onmessage?.({ data }));
        };
        inner.document.body.append(script);
      });
    }
    postMessage(sent) {
      const data = structuredClone(sent);
      this.ready.then(() =>
        this.frame.contentWindow?.dispatchEvent(new MessageEvent("message", { data })), () => {});
    }
    terminate() { this.frame.remove(); }
  };
}
