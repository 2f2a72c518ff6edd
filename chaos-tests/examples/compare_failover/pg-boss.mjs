// A worker of pg-boss whose handler is the witness:
//   node pg-boss.mjs FOLDER URL install                               makes schema and queue
//   node pg-boss.mjs FOLDER URL work WITNESS JOURNAL CONCURRENCY      works until SIGTERM
// FOLDER is where npm has installed pg-boss.
import { spawn } from 'node:child_process'
import { randomUUID } from 'node:crypto'
import { createRequire } from 'node:module'

const [folder, connectionString, what, witness, journal, concurrency] = process.argv.slice(2)
const { PgBoss } = createRequire(`${folder}/`)('pg-boss')

const boss = new PgBoss({
  connectionString,
  // Jobs whose heartbeat has stopped are looked for each second (by default, each minute).
  superviseIntervalSeconds: 1,
  monitorIntervalSeconds: 1,
  // An option of node-postgres: without it, a query to a server that has fallen silent is waited for as long as that is silent.
  query_timeout: 2000,
  connectionTimeoutMillis: 2000,
  schedule: false
})
// What is not listened for would end the process.
boss.on('error', error => console.error(new Date().toISOString(), error.message))
await boss.start()

if (what === 'install') {
  await boss.createQueue('work', {
    // The least that it takes (by default, none, and a dead worker's jobs wait for `expireInSeconds`, 15 minutes).
    heartbeatSeconds: 10,
    // No job is to fail for good by any chaos. A second between the attempts, as tenure's handlers have it.
    retryLimit: 1000,
    retryDelay: 1
  })
  await boss.stop()
} else {
  process.once('SIGTERM', () => boss.stop())
  await boss.work(
    'work',
    { localConcurrency: Number(concurrency), pollingIntervalSeconds: 0.5, heartbeatRefreshSeconds: 1, includeMetadata: true },
    ([job]) => run(job)
  )
}

// Runs the witness to its end. It is ended when pg-boss says that the job is another's (`job.signal`), and it dies with this process, as a
// function within it would.
function run (job) {
  const token = randomUUID()
  const handler = spawn('setpriv', ['--pdeathsig', 'KILL', 'sh', witness, journal], {
    stdio: ['ignore', 'ignore', 'inherit'],
    env: {
      ...process.env,
      TENURE_JOB_ID: job.id,
      TENURE_JOB_TYPE: job.data.job_type,
      TENURE_ATTEMPT: String(job.retryCount + 1),
      TENURE_TOKEN: token
    }
  })
  let kill
  const over = () => {
    handler.kill('SIGTERM')
    kill = setTimeout(() => handler.kill('SIGKILL'), 500)
  }
  job.signal.addEventListener('abort', over)
  return new Promise((resolve, reject) => {
    handler.on('error', reject)
    handler.on('exit', (code, signal) => {
      job.signal.removeEventListener('abort', over)
      clearTimeout(kill)
      code === 0 ? resolve({ token }) : reject(new Error(`the handler ended with ${code ?? signal}`))
    })
  })
}
