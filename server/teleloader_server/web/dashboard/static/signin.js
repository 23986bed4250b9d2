// Sign-in with a token: it is sent once, and the browser keeps a session cookie that scripts cannot read.

import { byId, say } from "./dom.js";

export class SignIn {
  #section = byId("sign-in");
  #form = byId("token");
  #status = byId("sign-in-status");
  #button = byId("sign-out");
  #admitted = null; // called after sign-in

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#button.addEventListener("click", async () => {
      await fetch("session", { method: "DELETE" });
      location.reload(); // removes everything that was shown
    });
  }

  // Wait until this browser is authorized for statistics.
  async admitted() {
    const session = await (await fetch("session")).json();
    if (!this.#show(session)) await new Promise((resolve) => (this.#admitted = resolve));
  }

  async #send() {
    const { token } = this.#form.elements;
    const submit = this.#form.querySelector("button");
    submit.disabled = true;
    say(this.#status, "");
    try {
      const body = JSON.stringify({ token: token.value.trim() });
      const answer = await fetch("session", { method: "POST", body });
      const said = await answer.json();
      if (!answer.ok) say(this.#status, said.detail);
      else if (this.#show(said)) this.#admitted?.();
    } catch {
      say(this.#status, "No response from the server.");
    } finally {
      token.value = "";
      submit.disabled = false;
    }
  }

  // Show or hide the form; return true if statistics are authorized.
  #show({ required, name, scopes }) {
    const sees = !required || scopes.includes("stats") || scopes.includes("admin");
    const signedIn = required && name !== null;
    document.body.classList.toggle("signed-out", !sees);
    this.#section.hidden = sees;
    this.#button.hidden = !signedIn;
    say(this.#button, signedIn ? `Sign out ${name}` : "");
    say(this.#status, signedIn && !sees ? `The token ${name} lacks the scope stats.` : "");
    if (required) {
      // /docs is disabled on servers with tokens, because it loads third-party scripts
      byId("api").setAttribute("href", "openapi.json");
      say(byId("api"), "/openapi.json");
    }
    if (!sees) {
      say(byId("state"), signedIn ? "Signed in without the scope stats" : "Signed out");
      byId("state").dataset.tone = "idle";
      this.#form.elements.token.focus();
    }
    return sees;
  }
}
