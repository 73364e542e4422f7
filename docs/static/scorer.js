// Order the results of a search: first the pages that have all its words in their titles, the shortest titles first.
const stems = (text) => {
  const stemmer = new Stemmer(); // Sphinx has it for the language of the site
  return text.toLowerCase().split(/[^\p{L}\p{N}_]+/u).filter(Boolean).map((word) => stemmer.stemWord(word));
};

const rank = (query, [docname, title, anchor, descr, score]) => {
  if (anchor) return score; // a section, or an object of Python
  const asked = stems(query);
  const words = stems(title);
  return asked.length && asked.every((word) => words.includes(word)) ? 100 + score - words.length : score;
};

var Scorer = {
  score: (result) => rank(new URLSearchParams(window.location.search).get("q") || "", result),
  // The rest is what Sphinx has without a scorer.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
