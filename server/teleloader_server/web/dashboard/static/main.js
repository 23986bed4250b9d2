// The page: each event of the stream is shown by the parts, which know nothing of each other.

import { Answer } from "./answer.js";
import { BatchView } from "./batch.js";
import { ConsumerTable } from "./consumers.js";
import { Crowd } from "./crowd.js";
import { DatasetList } from "./datasets.js";
import { ErrorList } from "./errors.js";
import { Header } from "./header.js";
import { HistoryView } from "./history.js";
import { Links } from "./links.js";
import { ServerFigures } from "./server.js";
import { ServerList } from "./servers.js";
import { SignIn } from "./signin.js";
import { SlowList } from "./slow.js";
import { follow } from "./stream.js";
import { Timeline } from "./timeline.js";
import { WorkerPage } from "./worker.js";
import { WorkerTable } from "./workers.js";

const crowd = new Crowd();
const header = new Header();
const workers = new WorkerTable();
const batch = new BatchView();
const signIn = new SignIn();
const shown = [header, new Answer(), new ServerList(), new HistoryView(), new ServerFigures(), new ConsumerTable(), workers,
  new DatasetList(), new ErrorList(), new SlowList(), batch, new Links(batch, new WorkerPage())];

new Timeline();

let latest = null;

function show() {
  if (latest !== null) for (const part of shown) part.show(latest.stats, latest.consumers);
}

follow(
  () => signIn.admitted(),
  (stats) => {
    latest = { stats, consumers: crowd.take(stats) };
    workers.note(stats.workers);
    if (!document.hidden) show();
  },
  () => header.lose(),
);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) show();
});
