// Runs the cases of a program, and prints the outcome of each as a line of JSON.

export async function run(...cases) {
  const url = `${process.argv[2]}/v1`;
  for (const one of cases) {
    const outcome = { case: one.name };
    try {
      outcome.result = await one(url);
    } catch (error) {
      outcome.error = `${error.stack}\n${JSON.stringify(error.responseBody ?? error.error ?? null)}`;
    }
    console.log(JSON.stringify(outcome));
  }
}
