// First in the page, so that a failure of any later script shows a message and not a blank page.
window.addEventListener('error', (event) => window.say_failure(event.message));
window.addEventListener('unhandledrejection', (event) => window.say_failure(String(event.reason)));
window.say_failure = (message) => {
  document.documentElement.dataset.error = message;
  const line = document.createElement('p');
  line.className = 'note failure';
  line.textContent = `This page could not be drawn in full: ${message}`;
  document.body?.prepend(line);
};
