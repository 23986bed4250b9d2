// OpenID provider (https://github.com/panva/node-oidc-provider) for service accounts, whose access tokens are JWTs.
// Arguments: folder of the package, URL to listen on, audience, lifetime of tokens in seconds, algorithm.
import { generateKeyPairSync } from "node:crypto";

const [folder, url, audience, lifetime, algorithm] = process.argv.slice(2);
const { Provider } = await import(`${folder}/lib/index.js`);
const pairs = [generateKeyPairSync("rsa", { modulusLength: 2048 }), generateKeyPairSync("ec", { namedCurve: "P-256" })];
const server = {
  scope: "batches", audience, accessTokenFormat: "jwt", accessTokenTTL: Number(lifetime), jwt: { sign: { alg: algorithm } },
};
const provider = new Provider(url, {
  clients: [{
    client_id: "trainer", client_secret: "a-secret-of-a-test", grant_types: ["client_credentials"], redirect_uris: [],
    response_types: [],
  }],
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: { enabled: true, getResourceServerInfo: () => server },
  },
  jwks: { keys: pairs.map((pair) => ({ ...pair.privateKey.export({ format: "jwk" }), use: "sig" })) },
});
provider.listen(Number(new URL(url).port), "127.0.0.1", () => console.log("ready"));
