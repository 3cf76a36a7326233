// Runs the network for the widgets of a page, so that the page stays responsive.
import {open, predict} from "../../support/web/assets/model.js";

async function answer({about, id, rows}) {
  try {
    if (rows) return postMessage({id, logits: await predict(rows)});
    let isLoading = true;
    const report = (loaded, total) => isLoading && postMessage({loaded, total});
    const ready = await open(about, about.device, report).finally(() => { isLoading = false; });
    postMessage({ready});
  } catch (error) {
    postMessage({id, error: String(error)});
  }
}

let last = Promise.resolve();  // one after another: a session cannot run twice at the same time
onmessage = ({data}) => { last = last.then(() => answer(data)); };
