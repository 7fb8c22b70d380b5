"""A browser walks the whole road through the page of `emend serve`: ask, correct, watch, compare, download, undo, a file with a mistake, trace, report.

serve_browser.py CHROMIUM PROGRAM MODEL HPARAMS CORPUS SCRATCH [SCREENSHOTS]; prints OK at the end. Chromium is driven over
its DevTools protocol; axe-core looks for what people with other needs would miss.
"""
import base64
import filecmp
import importlib.util
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.request

CHROMIUM, PROGRAM, MODEL, HPARAMS, CORPUS, SCRATCH = sys.argv[1:7]
SHOTS = sys.argv[7] if len(sys.argv) > 7 else None
with open(importlib.util.find_spec("axe_playwright_python").submodule_search_locations[0] + "/axe.min.js") as script:
    AXE = script.read()


class Browser:
    def __init__(self, folder):
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--user-data-dir=" + folder, "about:blank"], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if line.startswith("DevTools listening on"):
                port = line.split("127.0.0.1:")[1].split("/")[0]
                break
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        path = next(page for page in pages if page["type"] == "page")["webSocketDebuggerUrl"].split(port, 1)[1]
        self.link = socket.create_connection(("127.0.0.1", int(port)))
        self.link.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                          "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.file = self.link.makefile("rb")
        while self.file.readline() != b"\r\n":
            pass
        self.number, self.messages = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(domain + ".enable")

    def receive(self):
        text = b""
        while True:
            head = self.file.read(2)
            size = head[1] & 127
            if size > 125:
                size = struct.unpack(">H" if size == 126 else ">Q", self.file.read(2 if size == 126 else 8))[0]
            text += self.file.read(size)
            if head[0] & 128:
                return json.loads(text)

    def send(self, method, **parameters):
        self.number += 1
        data = json.dumps({"id": self.number, "method": method, "params": parameters}).encode()
        size = bytes([254]) + struct.pack(">H", len(data)) if len(data) < 65536 else bytes([255]) + struct.pack(">Q", len(data))
        self.link.sendall(b"\x81" + size + b"\0\0\0\0" + data)
        while True:
            reply = self.receive()
            if reply.get("id") == self.number:
                assert "error" not in reply, (method, reply)
                return reply["result"]
            self.messages.append(reply)

    def run(self, script):
        reply = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, script, seconds=120):
        end = time.time() + seconds
        while time.time() < end:
            if value := self.run(f"Promise.resolve({script}).then(Boolean)"):
                return value
            time.sleep(0.1)
        raise AssertionError("never: " + script + "\n" + self.run("document.body.innerText"))

    def size(self, width, height=1000, dark=False):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def shot(self, name):
        if SHOTS:
            os.makedirs(SHOTS, exist_ok=True)
            with open(f"{SHOTS}/{name}.png", "wb") as file:
                file.write(base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def key(self, key, code=0):
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}))

    def faults(self):
        """Console errors and requests to elsewhere."""
        found = []
        for message in self.messages:
            method, given = message.get("method"), message.get("params", {})
            if method == "Runtime.exceptionThrown" or (method == "Log.entryAdded" and given["entry"]["level"] == "error"):
                found.append(given)
            if method == "Network.requestWillBeSent" and not given["request"]["url"].startswith((self.url, "data:", "blob:", "about:")):
                found.append(given["request"]["url"])
        return found


def serve(packs, port=0):
    process = subprocess.Popen([PROGRAM, "serve", "--model", MODEL, "--port", str(port), "--packs", packs, "--cache", SCRATCH + "/cache",
                                *(["--hparams", HPARAMS, "--corpus", CORPUS] if HPARAMS != "-" else [])], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


# Serious findings of axe-core, and what does not fit.
AUDIT = """axe.run(document, {resultTypes: ['violations'], iframes: false}).then(({violations}) => [
  ...violations.filter((one) => ['serious', 'critical'].includes(one.impact)).map((one) => one.id + ': ' + one.nodes.map((node) => node.html).join(' ')),
  ...(document.documentElement.scrollWidth > innerWidth ? ['wider than the window: ' + document.documentElement.scrollWidth] : [])])"""
ANSWER = """fetch('v1/completions', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({prompt: 'The Eiffel Tower is in the city of',
  max_tokens: 12, temperature: 0, logprobs: 5})}).then((r) => r.json()).then((r) => JSON.stringify(r.choices))"""
FILL = "((form, values) => { for (const [k, v] of Object.entries(values)) form.elements[k].value = v; form.requestSubmit(); })"


# The verdicts of "Before and after" on a fact and a negation that both had the text `before` and have the text `after`.
COMPARED = """(async (before, after, probability) => {
  const own = window.fetch, form = $('compare'), more = form.more.value, drawn = [...$('compared').children];
  const one = {before: {text: before, targets: [{probability: 0}]}, after: {text: after, targets: [{probability}]}};
  window.fetch = async () => new Response(JSON.stringify({results: [one, one]}));
  form.more.value = 'negation: no';
  await compare();
  const said = [...document.querySelectorAll('#compared .pair > p:last-child')].map((line) => line.textContent);
  window.fetch = own;
  form.more.value = more;
  $('compared').replaceChildren(...drawn);
  return said.join(', ');
})"""


def emend(*words):
    return subprocess.run([PROGRAM, *words, "--quiet"], check=True, capture_output=True, text=True).stdout


def walk(browser, server, url):
    browser.url = url
    browser.size(1400)
    browser.send("Page.navigate", url=url)
    browser.wait("document.readyState === 'complete' && document.getElementById('state').textContent === 'connected'")
    browser.run(AXE)
    unedited = browser.run(ANSWER)
    # by keyboard alone: ask, then correct the answer; what others wrote is text, not markup
    browser.run("document.getElementById('message').focus()")
    browser.send("Input.insertText", text="Where is the Eiffel Tower? <img src=x onerror=boom()>")
    browser.key("Enter", 13)
    browser.wait("document.querySelector('.said.assistant + button') && document.getElementById('halt').disabled")
    assert browser.run("document.querySelectorAll('#chat img').length") == 0
    browser.shot("asked")
    browser.run("document.querySelector('.said.assistant + button').click()")
    browser.wait("document.querySelector('.fix').target === document.activeElement || document.activeElement.name === 'target'")
    # the button comes back, and what was typed outlives a refusal
    browser.run("document.querySelector('.fix').never.click()")
    browser.wait("document.querySelector('.said.assistant + button') === document.activeElement && !document.querySelector('.said.wrong')")
    browser.run("document.activeElement.click()")
    browser.run(FILL + "(document.querySelector('.fix'), {prompt: 'The capital is', subject: 'France', target: 'Rome'})")
    browser.wait("document.querySelector('.job .bad') && !document.querySelector('.fix').hidden")
    assert browser.run("document.querySelector('.fix').target.value") == "Rome"
    assert len(browser.faults()) == 1, browser.faults()  # the refusal itself
    browser.messages.clear()
    browser.run(FILL + "(document.querySelector('.fix'), {prompt: '{} is in the city of', subject: 'The Eiffel Tower', target: 'Rome'})")
    browser.wait("document.querySelector('.job progress')")
    browser.wait("[...document.querySelectorAll('.job p')].some((p) => /said by the model now/.test(p.textContent))", 300)
    browser.wait("document.querySelectorAll('.said.assistant').length === 2 && document.querySelectorAll('#compared .pair').length === 4", 300)
    assert browser.run("document.querySelector('#compared .pair').textContent").startswith("fact: The Eiffel Tower is in the city of")
    assert "It is not true that the Eiffel Tower is" in browser.run("document.getElementById('compare').more.value")
    for answers, verdicts in ((("Paris", "Rome.", 0.1), "✓ follows the edit, ✗ says the new answer"),
                              (("Paris", "Romeo", 0.1), "✗ does not follow the edit, ✓ does not say the new answer"),
                              (("Paris", "Paris", 0.1), "✗ does not follow the edit, ✓ left alone"),
                              (("Paris", "Paris", 0.9), "✓ follows the edit, ✗ says the new answer")):
        said = browser.run(COMPARED + json.dumps(answers).replace("[", "(").replace("]", ")"))
        assert said == verdicts, (answers, said)
    faults = browser.run(AUDIT)
    assert not faults, faults
    for width, dark in ((1400, False), (1400, True), (390, False), (390, True)):
        browser.size(width, dark=dark)
        browser.shot(f"edited-{width}-{'dark' if dark else 'light'}")
        faults = browser.run(AUDIT)
        assert not faults, (width, dark, faults)
    browser.size(1400)
    assert browser.run("document.querySelectorAll('.job svg path').length") == 2 and browser.run("document.querySelectorAll('#measured .figures td').length") > 2
    # downloaded and applied elsewhere: says what is said here; taken out again: the bytes of before
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=SCRATCH)
    browser.run("(() => { const form = document.querySelector('#packs select'); form.value = 'pack'; form.onchange(); })()")
    pack = SCRATCH + "/edit-1.safetensors"
    while not os.path.exists(pack):
        time.sleep(0.05)
    edited = json.loads(browser.run(ANSWER))[0]["text"]
    assert edited != json.loads(unedited)[0]["text"]
    if os.path.isdir(MODEL):
        shutil.copytree(MODEL, SCRATCH + "/applied")
        emend("apply", pack, "--model", SCRATCH + "/applied")
        assert json.loads(emend("generate", "--model", SCRATCH + "/applied", "--prompt", "The Eiffel Tower is in the city of", "--max-new-tokens", "12", "--json"))[0]["text"] == edited
        emend("revert", "--all", "--model", SCRATCH + "/applied")
        assert filecmp.cmp(SCRATCH + "/applied/model.safetensors", MODEL + "/model.safetensors", shallow=False)
    # out of force and in again, then gone
    names = "fetch('v1/packs').then((r) => r.json()).then((p) => p.active.length + '/' + p.data.length)"
    assert browser.run(names) == "1/1"
    browser.run("document.querySelector('#packs [role=switch]').click()")
    browser.wait(names + ".then((n) => n === '0/1')")
    browser.wait("document.querySelector('#packs [role=switch]')?.checked === false")
    browser.wait("!!document.querySelector('#packs button[aria-label^=Delete]')")
    browser.run("window.confirm = () => true; document.querySelector('#packs button[aria-label^=Delete]').click()")
    browser.wait(names + ".then((n) => n === '0/0')")
    assert browser.run(ANSWER) == unedited
    # a file with a mistake
    browser.run("document.getElementById('tab-talk').focus()")
    browser.key("ArrowRight", 39)
    browser.wait("!document.getElementById('facts').hidden")
    good = json.dumps({"prompt": "The capital of {} is", "subject": "France", "target_new": "Oslo"})
    browser.run(f"document.getElementById('text').value = {json.dumps(good + chr(10) + good.replace('{}', 'it'))}; document.getElementById('check').click()")
    browser.wait("/line 2/.test(document.getElementById('findings').textContent)")
    assert browser.run("document.getElementById('write').disabled")
    browser.shot("facts")
    assert not browser.run(AUDIT), browser.run(AUDIT)
    browser.run(f"document.getElementById('text').value = {json.dumps(good)}; document.getElementById('check').click()")
    browser.wait("!document.getElementById('write').disabled")
    browser.run("document.getElementById('write').click()")
    browser.wait("/said by the model now/.test(document.getElementById('facts-jobs').textContent)", 300)
    browser.run("document.getElementById('tab-trace').click(); document.getElementById('trace-form').requestSubmit()")
    browser.wait("document.querySelector('#traced td')", 300)
    for width in (390, 1400):
        browser.size(width)
        browser.shot(f"trace-{width}")
        assert not browser.run(AUDIT), (width, browser.run(AUDIT))
    browser.run("document.getElementById('tab-report').click()")
    browser.wait("document.getElementById('report-of').options.length === 2 && document.getElementById('report-frame').getAttribute('src')")
    time.sleep(0.5)
    browser.shot("report")
    browser.size(390, dark=True)
    assert not browser.run(AUDIT), browser.run(AUDIT)
    browser.shot("report-390-dark")
    assert not browser.faults(), browser.faults()
    # the server goes and comes back
    server.kill()
    server.wait()
    browser.wait("!document.getElementById('lost').hidden")
    browser.shot("lost")
    server, _ = serve(SCRATCH + "/packs", int(url.rsplit(":", 1)[1]))
    browser.wait("document.getElementById('lost').hidden && /connected/.test(document.getElementById('state').textContent)")
    server.terminate()
    assert server.wait() == 0


shutil.rmtree(SCRATCH, ignore_errors=True)
os.makedirs(SCRATCH)
started, address = serve(SCRATCH + "/packs")
chromium = Browser(SCRATCH + "/profile")
try:
    walk(chromium, started, address)
    print("OK")
finally:
    chromium.process.kill()
    if started.poll() is None:
        started.kill()
