// Signing in, where the server wants a token: it is sent once, and the browser keeps a cookie that scripts cannot read.

import { byId, say } from "./dom.js";

export class SignIn {
  #section = byId("sign-in");
  #form = byId("token");
  #status = byId("sign-in-status");
  #button = byId("sign-out");
  #admitted = null; // called when somebody has signed in

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#button.addEventListener("click", async () => {
      await fetch("session", { method: "DELETE" });
      location.reload(); // so that nothing is left of what was shown
    });
  }

  // Wait until the server lets this browser see its figures.
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
      say(this.#status, "The server does not answer.");
    } finally {
      token.value = "";
      submit.disabled = false;
    }
  }

  // Whether there is nothing to sign in for.
  #show({ required, name, scopes }) {
    const sees = !required || scopes.includes("stats") || scopes.includes("admin");
    const signedIn = required && name !== null;
    document.body.classList.toggle("signed-out", !sees);
    this.#section.hidden = sees;
    this.#button.hidden = !signedIn;
    say(this.#button, signedIn ? `Sign out ${name}` : "");
    say(this.#status, signedIn && !sees ? `The token ${name} is not for figures: that needs the scope stats.` : "");
    if (required) {
      // there, /docs is off: its scripts come from elsewhere
      byId("api").setAttribute("href", "openapi.json");
      say(byId("api"), "/openapi.json");
    }
    if (!sees) {
      say(byId("state"), signedIn ? "Signed in, not for figures" : "Signed out");
      byId("state").dataset.tone = "idle";
      this.#form.elements.token.focus();
    }
    return sees;
  }
}
