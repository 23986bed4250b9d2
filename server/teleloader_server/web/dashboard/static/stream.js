// The server's figures as they come, whatever becomes of the connection.

const SILENCE = 10_000; // without an event for so long, the connection is dead whether or not the browser knows
const FIRST_WAIT = 500;
const LONGEST_WAIT = 8_000;

// Call `onStats` with each record, and `onLost` when the stream has ended; it reconnects until the page closes.
// Before each connection it awaits `admitted()`: a sign-in may be required.
// (EventSource reconnects as well, but not after responses such as 503 or when the server is unresponsive.)
export function follow(admitted, onStats, onLost) {
  let source;
  let watchdog;
  let wait = FIRST_WAIT;

  async function open() {
    try {
      await admitted();
    } catch {
      lose();
      return;
    }
    source = new EventSource("stats/stream?interval=1");
    source.addEventListener("stats", (event) => {
      wait = FIRST_WAIT;
      watch();
      onStats(JSON.parse(event.data));
    });
    source.addEventListener("error", lose);
    watch();
  }

  function watch() {
    clearTimeout(watchdog);
    watchdog = setTimeout(lose, SILENCE);
  }

  function lose() {
    clearTimeout(watchdog);
    source?.close();
    onLost();
    setTimeout(open, wait);
    wait = Math.min(2 * wait, LONGEST_WAIT);
  }

  open();
}
