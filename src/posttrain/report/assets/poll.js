// Ask the server of this page again and again.

// ask: fetches news and shows them. tell: shows why there are none, if the server does not answer.
function poll(ask, tell, milliseconds) {
  const again = () =>
    ask()
      .catch(() => tell('off', 'posttrain run watch has ended, or cannot be reached'))
      .finally(() => setTimeout(again, milliseconds));
  again();
}
